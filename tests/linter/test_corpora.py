"""What the linter says of the scripts in ``tests/data/lint`` is what is recorded there."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from ampaudit.report.lint import LintFinding
from tests.linter.corpora import SETS, Script, read_set, write_set
from tests.linter.examples import PAGES, lint
from tests.support.paths import ROOT

STYLES = "correct-styles"


def relevant(script: Script) -> list[LintFinding]:
    """Return errors and warnings: of a mistake, those on or next to a marked line."""
    linted = lint(script.source)
    assert not linted.unread, script.name
    if not script.marked:
        return linted.findings
    return [f for f in linted.findings if any(f.line - 1 <= mark <= f.end_line + 1 for mark in script.marked)]


def codes_of(findings: list[LintFinding]) -> list[str]:
    return sorted({finding.code for finding in findings})


def difference(script: Script, findings: list[LintFinding]) -> str | None:
    """Return how the findings differ from those recorded, or why those must not be recorded."""
    codes = codes_of(findings)
    should_be_found = bool(script.marked) and script.missed is None
    if codes == script.codes and bool(codes) == should_be_found:
        return None
    if should_be_found:
        expected = f"{script.codes or 'a code, or a reason in `missed`'} near line {script.marked}"
    else:
        expected = f"nothing (missed: {script.missed})" if script.missed else "nothing, as it is correct"
    lines = [f"    line {finding.line}, {finding.code}: {finding.source.strip()}" for finding in findings]
    return "\n".join([f"{script.name}: expected {expected}; the linter says {codes or 'nothing'}", *lines])


@pytest.mark.parametrize("name", SETS)
def test_the_findings_are_those_recorded(name: str, pytestconfig: pytest.Config) -> None:
    scripts = read_set(name)
    findings = [relevant(script) for script in scripts]
    if pytestconfig.getoption("--refresh-golden"):
        scripts = [replace(s, codes=codes_of(said)) for s, said in zip(scripts, findings, strict=True)]
        write_set(name, scripts)
    differences = [text for text in map(difference, scripts, findings) if text is not None]
    if differences:
        text = "\n".join([f"{name}: {len(differences)} of {len(scripts)} scripts differ", *differences])
        pytest.fail(text, pytrace=False)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("eleventh", 34, 2),
        ("thirteenth", 11, 0),
        ("fifteenth", 22, 0),
        ("seventeenth", 15, 1),
        ("nineteenth", 21, 0),
        ("twentyfirst", 19, 0),
        ("twentythird", 24, 0),
        ("twentyfifth", 19, 1),
        ("twentyseventh", 15, 0),
        ("twentyninth", 20, 0),
    ],
)
def test_the_sets_that_nobody_reads(name: str, least: int, most: int) -> None:
    """Only their totals are known, so that they say what the linter does in new code."""
    found = [bool(relevant(script)) for script in read_set(f"unread/mistakes-{name}")]
    alarms = [bool(relevant(script)) for script in read_set(f"unread/correct-{name}")]
    assert sum(found) >= least
    assert sum(alarms) <= most
    assert (len(found), len(alarms)) == ((40, 60) if name in ("eleventh", "thirteenth") else (24, 32))


def test_the_sets_are_whole() -> None:
    mistakes = [script for name in SETS if name.startswith("mistakes-") for script in read_set(name)]
    correct = [script for name in SETS if name.startswith("correct-") for script in read_set(name)]
    sizes = len(mistakes), len(correct), len(read_set(STYLES))
    assert sizes == (680, 838 + 89, 89), "if a script was added on purpose, change these numbers"
    assert len({script.name for script in mistakes}) == len(mistakes), "two mistakes have the same name"
    assert all(script.marked for script in mistakes)
    assert not any(script.marked for script in correct)


SHARE = re.compile(
    r"(Of\s+the\s+)\d+(\s+mistakes\s+in\s+the\s+project's\s+tests,\s+)\w+(\s+)(?:is|are)(\s+of\s+this\s+kind)"
)


def test_each_page_says_how_many_mistakes_are_of_its_kind(pytestconfig: pytest.Config) -> None:
    mistakes = [script for name in SETS if name.startswith("mistakes-") for script in read_set(name)]
    counts = Counter(code for script in mistakes for code in script.codes)
    for code in PAGES:
        page = ROOT / "ampaudit" / "findings" / "pages" / f"{code}.md"
        number, verb = counts[code] or "none", "are" if counts[code] > 1 else "is"
        text = page.read_text(encoding="utf-8")
        if pytestconfig.getoption("--refresh-golden"):
            text = SHARE.sub(rf"\g<1>{len(mistakes)}\g<2>{number}\g<3>{verb}\g<4>", text)
            page.write_text(text, encoding="utf-8", newline="\n")
        sentence = f"Of the {len(mistakes)} mistakes in the project's tests, {number} {verb} of this kind"
        assert sentence in " ".join(text.split()), f"pages/{code}.md must say: {sentence}. --refresh-golden"
