"""Tables at the width of a terminal, and whole where nothing limits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from ampaudit.cli.program import main
from ampaudit.core.sites import SiteId
from ampaudit.render.render import as_file, for_terminal
from ampaudit.render.terminal import as_text
from ampaudit.report.documents import Document
from tests.support.saved import NAMES, saved, saved_report

LONG = ".".join(["a_very_long_name_of_a_module"] * 8)


def named() -> Document:
    report = saved_report()
    sites = tuple(replace(site, site=SiteId(f"{LONG}.{i}/op")) for i, site in enumerate(report.sites))
    return replace(report, sites=sites, findings=())


@pytest.mark.parametrize("width", [80, 140])
def test_a_terminal_folds_and_a_pipe_does_not(width: int) -> None:
    shown = for_terminal(named(), 1)
    in_terminal = as_text(lambda console: console.print(shown), width, terminal=True)
    assert max(map(len, in_terminal.splitlines())) <= width
    assert LONG not in in_terminal
    in_pipe = as_text(lambda console: console.print(shown, crop=False), width)
    assert all(f"{LONG}.{i}/op" in in_pipe for i in range(50))
    assert "…" not in in_pipe


@pytest.mark.parametrize("name", NAMES)
def test_no_table_is_cut_in_a_file(name: str) -> None:
    wide = as_text(lambda console: console.print(for_terminal(saved(name)), crop=False), 5000)
    narrow = as_text(lambda console: console.print(for_terminal(saved(name)), crop=False), 40)
    assert sorted("".join(narrow.split())) == sorted("".join(wide.split()))
    assert "…" not in as_file(saved(name), "text").replace("… ", "")


@pytest.mark.parametrize(
    "words", [["rules", "list"], ["explain"], ["devices"], ["rules", "show", "ampaudit"]], ids=" ".join
)
def test_lists_are_whole_in_a_pipe(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(columns: str) -> list[str]:
        monkeypatch.setenv("COLUMNS", columns)
        result: Any = CliRunner().invoke(main, list(words), catch_exceptions=False)
        assert result.exit_code == 0
        return sorted("".join(result.output.split()))

    assert printed("40") == printed("900")


def test_coverage_and_contract_are_details() -> None:
    report = saved_report()
    short, full = (as_text(lambda c, v=v: c.print(for_terminal(report, v)), 100) for v in (0, 1))  # type: ignore[misc]
    assert "Coverage" not in short
    assert "Contract" not in short
    assert "Coverage" in full
    assert "Contract" in full
    gaps = replace(report, coverage=replace(report.coverage, audited=3, uncovered_ops=("aten.foo.default",)))
    assert "3 of 54 floating-point sites audited" in " ".join(as_file(gaps, "text").split())
    asked = replace(report, run=replace(report.run, backend="emulated: saturate"))
    assert "Contract" in as_file(asked, "text")
