"""The replay of audits and commands: what it leaves out, what it shows, and that it notices a change."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.rule_file import GOOD
from tools.replay import main as program
from tools.replay.case import Case, Outcome, run_case, session
from tools.replay.table import all_cases
from tools.replay.text import difference, normalized

TEXT = """\
{
 "tool": {"name": "ampaudit", "version": "0.1.0"},
 "timings": {
  "trace": 0.25,
  "run": 1e-05
 },
 "seconds": 0.5, "peak_db": 0.5, "file": "ROOT/model.py:3 in FOLDER/out, PACKAGES/lib"
}
"""


def test_only_times_versions_and_places_are_left_out(tmp_path: Path) -> None:
    placed = TEXT.replace("ROOT", str(ROOT)).replace("FOLDER", str(tmp_path)).replace("PACKAGES", sys.prefix)
    later = placed.replace("0.1.0", "0.2.0").replace("0.25", "12.5").replace('"seconds": 0.5', '"seconds": 7')
    found = json.loads(normalized(placed, tmp_path))
    assert normalized(later, tmp_path) == normalized(placed, tmp_path)
    assert found["timings"].keys() == {"trace", "run"}
    assert (found["peak_db"], found["tool"]["name"]) == (0.5, "ampaudit")
    assert found["file"] == "ROOT/model.py:3 in FOLDER/out, PACKAGES/lib"


def test_of_a_difference_the_first_lines_are_shown() -> None:
    old = [f"line {number}" for number in range(200)]
    shown = difference("scan/x", "\n".join(old), "\n".join([*old[:50], *(f"{line}!" for line in old[50:])]))
    assert "-line 50" in shown
    assert shown.endswith("[...]\n")
    assert len(shown.splitlines()) < 30


def test_of_a_long_line_the_part_that_differs_is_shown() -> None:
    old = json.dumps([{"site": f"layer.{number}/linear", "peak": 1.0} for number in range(100)])
    shown = difference(
        "scan/x", old, old.replace('"layer.70/linear", "peak": 1.0', '"layer.70/linear", "peak": 2.0')
    )
    assert '"peak": 2.0' in shown
    assert len(shown) < 1000


def test_there_are_enough_cases() -> None:
    names = [case.name for case in all_cases()]
    assert len(names) >= 250
    assert len({name.lower() for name in names}) == len(names), "each has a file of its own"


def written(folder: Path) -> None:
    (folder / "mine.yaml").write_text(GOOD, encoding="utf-8")


def broken(_: Path) -> str:
    raise ZeroDivisionError("of the case")


@pytest.fixture
def cases(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Three cheap cases, which are run in this process."""

    def outcomes_of(chosen: Iterable[Case]) -> Iterator[Outcome]:
        return map(run_case, chosen)

    cases = [
        Case("rules/list", session("rules list --format json")),
        Case("rules/unknown", session("rules show missing")),
        Case("rules/file", session("rules validate {}/mine.yaml", prepare=written)),
    ]
    monkeypatch.setattr(program, "all_cases", lambda: cases)
    monkeypatch.setattr(program, "outcomes_of", outcomes_of)
    return cases


def test_a_changed_document_is_noticed(
    cases: list[Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["record", str(tmp_path)]) == 0
    assert "exit code 2" in (tmp_path / "rules" / "unknown.txt").read_text(encoding="utf-8")
    assert program.main(["compare", str(tmp_path)]) == 0
    assert "3 equal, 0 different, 0 missing, 0 new" in capsys.readouterr().out

    path = tmp_path / "rules" / "list.txt"
    path.write_text(path.read_text(encoding="utf-8").replace("torch-cuda", "torch-cpu"), encoding="utf-8")
    assert program.main(["compare", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert re.search("(?m)^-.*torch-cpu.*\n([-+].*\n)*[+].*torch-cuda", out)
    assert "different: rules/list" in out
    assert program.main(["compare", str(tmp_path), "--only", "unknown"]) == 0


def test_cases_that_come_and_go_are_noticed(
    cases: list[Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["record", str(tmp_path)]) == 0
    cases[0] = Case("rules/other", cases[0].run)
    assert program.main(["compare", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "missing: rules/list" in out
    assert "new: rules/other" in out


def test_a_case_that_crashes_is_no_record(
    cases: list[Case], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases.append(Case("broken", broken))
    assert program.main(["record", str(tmp_path)]) == 1
    assert "crashed: broken: ZeroDivisionError: of the case" in capsys.readouterr().out
