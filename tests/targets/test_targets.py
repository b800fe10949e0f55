"""Each target of docs/targets.md is audited, or refused with one line that helps."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from ampaudit.cli.program import run_command
from tests.support.paths import ROOT
from tests.targets.cases import CASES, Case
from tests.targets.page import page


@pytest.mark.filterwarnings("ignore")  # what the models themselves use
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_target_gives_what_the_page_says(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in case.needs:
        pytest.importorskip(package)
    monkeypatch.setattr(sys, "argv", ["ampaudit", "scan", case.location(tmp_path), *case.options])
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = run_command()
    printed = " ".join(f"{out.getvalue()} {err.getvalue()}".split())
    assert code == case.code, printed
    assert case.gives in printed
    if case.code >= 2:
        *_, message, hint = err.getvalue().strip().splitlines()
        assert message.startswith("ampaudit: ")
        assert hint.startswith("  next: ")


def test_the_page_is_made_from_the_cases() -> None:
    assert (ROOT / "docs" / "targets.md").read_text(encoding="utf-8") == page()
