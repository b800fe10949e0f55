"""Selecting and ignoring rules by code and prefix."""

from __future__ import annotations

import pytest

from ampaudit.core.errors import UsageError
from ampaudit.linter.config import LintConfig
from ampaudit.linter.linting import lint_text
from ampaudit.linter.selection import RuleSelection
from tests.linter.examples import BAD


def test_codes_are_chosen_by_how_they_begin() -> None:
    text = BAD["AMP803"] + "\n\n" + BAD["AMP861"]

    def chosen(select: str, ignore: str = "") -> set[str]:
        choice = RuleSelection.of(LintConfig(select=[select], ignore=[ignore]))
        return {finding.code for finding in lint_text(text, "x.py", choice).findings}

    assert chosen("") == {"AMP803", "AMP861"}
    assert chosen("AMP80") == {"AMP803"}
    assert chosen("AMP8", "AMP80") == {"AMP861"}
    assert chosen("AMP86") == {"AMP861"}
    assert chosen("AMP803,amp86", "AMP8") == {"AMP803", "AMP861"}
    assert chosen("ALL", "AMP861") == {"AMP803"}
    with pytest.raises(UsageError, match="'AMP102' matches no lint rule"):
        RuleSelection.of(LintConfig(select=["AMP102"]))
