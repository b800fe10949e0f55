"""Outputs that are finite and wrong: the scan fails, and names the line where the error enters."""

from __future__ import annotations

import pytest

from ampaudit import scan
from ampaudit.report.model import Report
from tests.support.silent import CASES, Silent, culprit_lines


def audit(case: Silent, bad: bool) -> Report:
    model, inputs = case.build(bad)
    return scan(model.eval(), inputs, policy=case.policy, dtype=case.dtype)


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 20


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_the_line_where_the_error_enters_is_named_first(case: Silent) -> None:
    report = audit(case, True)
    first = report.findings[0]
    assert report.exit_code == 1
    assert (first.code, first.severity) in [(code, "error") for code in case.codes]
    assert first.source is not None
    assert first.source.line in culprit_lines(case), first


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_the_repaired_twin_passes(case: Silent) -> None:
    report = audit(case, False)
    assert [(f.code, f.site, f.cause) for f in report.findings if f.severity == "error"] == []
    assert report.exit_code == 0
