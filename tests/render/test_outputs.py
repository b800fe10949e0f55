"""Formats for machines: each is parsed by an independent reader, even with hostile names."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from email.message import Message
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml
from markdown_it import MarkdownIt
from rich.console import Console

import ampaudit.render.sarif as sarif
from ampaudit.core.errors import UsageError
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.core.text import escape_control
from ampaudit.findings.finding import Finding, Severity
from ampaudit.findings.pages import all_pages
from ampaudit.render.csv import to_csv
from ampaudit.render.github import to_github
from ampaudit.render.junit import to_junit
from ampaudit.render.markdown import code, escaped, to_markdown
from ampaudit.render.render import OUTPUT_FORMATS, as_file, chosen_format, for_terminal, formats_of
from ampaudit.render.sarif import to_sarif
from ampaudit.report.check import CheckResults
from ampaudit.report.documents import Document
from ampaudit.report.extrapolation import StressResult
from ampaudit.report.lint import LintReport
from ampaudit.report.model import Comparison, Report
from ampaudit.views.scan_tables import summary_rows
from tests.support.paths import DATA, ROOT
from tests.support.saved import HOSTILE, NAMES, named, sample, saved, saved_report, text_of

WITH_FINDINGS = tuple(name for name in NAMES if name not in ("plan", "bench"))
MACHINES = tuple(form for form in OUTPUT_FORMATS if form != "text")


@cache
def sarif_schema() -> jsonschema.Validator:
    schema = json.loads((DATA / "sarif-2.1.0.json").read_text())
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())


def sarif_of(document: Document) -> dict[str, Any]:
    log: dict[str, Any] = json.loads(to_sarif(document))
    sarif_schema().validate(log)
    return log


def many(report: Report, count: int) -> Report:
    first = report.findings[0]
    found = (replace(first, site=SiteId(f"{first.site}#{i}"), layer=f"layer.{i}") for i in range(count))
    return replace(report, findings=tuple(found))


# SARIF


@pytest.mark.parametrize("name", WITH_FINDINGS)
def test_sarif_is_valid_and_has_every_finding(name: str) -> None:
    document = saved(name)
    runs = sarif_of(document)["runs"]
    if isinstance(document, Report | Comparison):
        reports = document.reports if isinstance(document, Comparison) else (document,)
        assert [len(run["results"]) for run in runs] == [len(report.findings) for report in reports]
        found = [r["ruleId"] for run in runs for r in run["results"]]
        assert found == [f.code for report in reports for f in report.findings]
    for run in runs:
        rules = run["tool"]["driver"]["rules"]
        assert all(rules[r["ruleIndex"]]["id"] == r["ruleId"] for r in run["results"])
        assert len({r["partialFingerprints"]["ampauditSite/v1"] for r in run["results"]}) == len(
            run["results"]
        )


def test_the_rules_of_sarif_are_documented_by_their_pages() -> None:
    (run,) = sarif_of(saved("overflow"))["runs"]
    rules = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    assert rules.keys() == {finding.code for finding in saved_report().findings}
    for name, rule in rules.items():
        page = all_pages()[name]
        assert rule["help"] == {"text": page.text, "markdown": page.text}
        first = rule["fullDescription"]["text"]
        assert first
        assert first in " ".join(page.text.split())
        assert rule["shortDescription"]["text"] == page.title
        assert rule["defaultConfiguration"]["level"] == page.severity


def test_sarif_names_the_project_where_its_package_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def driver(*urls: str) -> dict[str, Any]:
        package = Message()
        for url in urls:
            package["Project-URL"] = url
        monkeypatch.setattr(sarif, "metadata", lambda name: package)
        found: dict[str, Any] = sarif_of(saved("overflow"))["runs"][0]["tool"]["driver"]
        return found

    assert "informationUri" not in driver()
    assert "informationUri" not in driver("Source, https://example.org/source")
    named = driver("Source, https://example.org/source", "Homepage, https://example.org/a,b")
    assert named["informationUri"] == "https://example.org/a,b"


def test_sarif_points_at_the_users_line() -> None:
    (run,) = sarif_of(saved("overflow"))["runs"]
    first = run["results"][0]
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "examples/t5_feed_forward.py", "uriBaseId": "%SRCROOT%"}
    line = (ROOT / "examples/t5_feed_forward.py").read_text().splitlines()
    assert line[place["region"]["startLine"] - 1].strip() == place["region"]["snippet"]["text"].strip()
    assert "self.wo" in place["region"]["snippet"]["text"]
    assert first["level"] == "error"
    assert "436,400" in first["message"]["text"]
    flow = first["codeFlows"][0]["threadFlows"][0]["locations"]
    assert len(flow) > 5
    assert flow[1]["location"]["logicalLocations"][0]["fullyQualifiedName"] == "blocks.1/add"


def test_a_line_inside_a_library_is_shown_at_the_callers() -> None:
    report = saved_report()
    source = report.findings[0].source
    assert source is not None
    inside = replace(source, file="/usr/lib/site-packages/torch/nn/functional.py", line=7, code="inside()")
    inside = replace(inside, caller=SourceLine("mine.py", 3, "call()"))
    report = replace(report, findings=(replace(report.findings[0], source=inside),))
    (result,) = sarif_of(report)["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "mine.py"
    assert result["relatedLocations"][0]["physicalLocation"]["region"]["startLine"] == 7
    assert "::error file=mine.py,line=3," in to_github(report)


def test_suppressed_findings_are_in_sarif_and_nowhere_an_alarm() -> None:
    report = saved_report()
    first = replace(report.findings[0], suppressed="comment: known")
    second = replace(report.findings[1], suppressed="--ignore AMP101")
    hidden = replace(report, findings=(first, second), verdict="pass", combined=None)
    results = sarif_of(hidden)["runs"][0]["results"]
    assert [r["suppressions"][0]["kind"] for r in results] == ["inSource", "external"]
    assert "::error" not in to_github(hidden)
    assert JUnitXml.fromstring(to_junit(hidden).encode()).failures == 0
    assert "AMP101" not in to_markdown(hidden)


def test_the_same_finding_has_the_same_fingerprint_when_its_line_moves() -> None:
    report = saved_report()
    moved = []
    for finding in report.findings:
        source = replace(finding.source, line=finding.source.line + 40) if finding.source else None
        moved.append(replace(finding, source=source))
    prints = [
        [r["partialFingerprints"] for r in sarif_of(x)["runs"][0]["results"]]
        for x in (report, replace(report, findings=tuple(moved)))
    ]
    assert prints[0] == prints[1]


@pytest.mark.parametrize("kind", ["check", "lint"])
def test_what_identifies_a_suite_and_its_findings_does_not_count_targets(kind: str) -> None:
    """Code hosts keep alerts by the category of a run, and servers test results by the suite's name."""
    document = sample(kind)
    if isinstance(document, CheckResults):
        more: Document = replace(
            document, targets=(*document.targets, replace(document.targets[0], target="b.py"))
        )
    else:
        assert isinstance(document, LintReport)
        more = replace(document, linted=document.linted + 1)
    (before,), (after,) = (sarif_of(each)["runs"] for each in (document, more))
    assert before["automationDetails"]["id"] == after["automationDetails"]["id"]
    known = [result["partialFingerprints"] for result in before["results"]]
    assert [result["partialFingerprints"] for result in after["results"]][: len(known)] == known
    suites = [next(iter(JUnitXml.fromstring(to_junit(each).encode()))) for each in (document, more)]
    assert suites[0].name == suites[1].name


@pytest.mark.parametrize("kind", ["check", "lint"])
@pytest.mark.parametrize("form", [to_github, to_markdown])
def test_what_could_not_be_checked_is_counted(kind: str, form: Callable[[Document], str]) -> None:
    assert "1 not checked; gate: fail" in form(sample(kind))


def test_sarif_keeps_to_the_most_that_code_hosts_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sarif._MAX_RESULTS == 25_000
    monkeypatch.setattr(sarif, "_MAX_RESULTS", 200)  # writing 25,000 takes half a minute
    (run,) = json.loads(to_sarif(many(saved_report(), 300)))["runs"]
    assert len(run["results"]) == 200
    told = run["invocations"][0]["toolExecutionNotifications"]
    assert "100 more findings" in told[0]["message"]["text"]


@pytest.mark.parametrize("file", ["my model.py", "ünï/a,b:c%20.py", "a{0}.py", "dir/[x](y).py"])
def test_odd_file_names_are_uris_and_properties(file: str) -> None:
    report = saved_report()
    source = report.findings[0].source
    assert source is not None
    moved = replace(report, findings=(replace(report.findings[0], source=replace(source, file=file)),))
    uri = sarif_of(moved)["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"][
        "uri"
    ]
    assert unquote(uri) == file
    assert re.fullmatch(r"(?:[A-Za-z0-9._~/-]|%[0-9A-F]{2})+", uri)
    assert commands(to_github(moved))[0][1]["file"] == file


def test_a_file_name_is_the_same_uri_in_any_locale(cli: Callable[..., Any], tmp_path: Path) -> None:
    report = saved_report()
    assert report.findings[0].source is not None
    source = replace(report.findings[0].source, file="/nowhere/mödel.py")
    moved = replace(report, findings=(replace(report.findings[0], source=source),))
    (tmp_path / "r.json").write_text(as_file(moved, "json"), encoding="utf-8")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = cli("report", tmp_path / "r.json", "--format", "sarif", **ascii_only)
    assert done.returncode == 0, done.stderr
    assert '"file:///nowhere/m%C3%B6del.py"' in done.stdout


def test_braces_and_brackets_in_a_message_are_text() -> None:
    """SARIF 2.1.0, 3.11: ``{0}`` would be a placeholder, ``[a](b)`` a link."""
    report = saved_report()
    first = replace(report.findings[0], cause="layer {0} of [a](b)", tried=(), advice="")
    text = sarif_of(replace(report, findings=(first,)))["runs"][0]["results"][0]["message"]["text"]
    assert "layer {{0}} of [a\\](b)" in text


# JUnit


@pytest.mark.parametrize("name", WITH_FINDINGS)
def test_junit_counts_as_another_reader_does(name: str) -> None:
    document = saved(name)
    parsed = JUnitXml.fromstring(to_junit(document).encode())
    suites = list(parsed)
    for suite in suites:
        cases = list(suite)
        assert suite.tests == len(cases)
        assert suite.failures == sum(any(isinstance(r, Failure) for r in c.result) for c in cases)
        assert suite.errors == sum(any(isinstance(r, Error) for r in c.result) for c in cases)
    assert parsed.tests == sum(suite.tests for suite in suites)
    if isinstance(document, Report):
        assert (parsed.failures > 0) == (document.exit_code != 0)


def test_junit_fails_the_layer_and_passes_its_neighbours() -> None:
    (suite,) = JUnitXml.fromstring(to_junit(saved("overflow")).encode())
    failed = {case.name for case in suite if case.result}
    assert failed == {"blocks.1.wo", "blocks.2.wo"}
    assert {"blocks.0.wo", "blocks.1.wi"} <= {case.name for case in suite} - failed
    message = next(case.result[0].message for case in suite if case.result)
    assert message == "AMP101 overflow at blocks.1.wo/linear"


def test_a_target_that_could_not_be_checked_is_an_error() -> None:
    (suite,) = JUnitXml.fromstring(to_junit(saved("check")).encode())
    by_name = {case.name: case.result for case in suite}
    assert isinstance(by_name["missing.py"][0], Error)
    assert "no such file" in by_name["missing.py"][0].message
    assert isinstance(by_name["examples/t5_feed_forward.py"][0], Failure)
    assert by_name["examples/ci/model.py"] == []


def test_an_error_with_control_characters_is_still_xml() -> None:
    check = saved("check")
    assert isinstance(check, CheckResults)
    bad = tuple(replace(target, error="\x1b[31mbroken\x00\n  next: look") for target in check.targets[2:])
    (suite,) = JUnitXml.fromstring(to_junit(replace(check, targets=bad)).encode())
    assert next(iter(suite)).result[0].message == "\\x1b[31mbroken\\x00"


# GitHub


def commands(text: str) -> list[tuple[str, dict[str, str], str]]:
    """Read workflow commands as the runner does: a line, properties, escapes."""
    found = []
    for line in text.split("\n"):
        match = re.match(r"::(\w+) ([^:]*)::(.*)$", line)
        if match is None:
            assert not line.startswith("::"), line
            continue
        pairs = (part.partition("=") for part in match[2].split(","))
        properties = {name: unescaped(value) for name, _, value in pairs}
        found.append((match[1], properties, unescaped(match[3])))
    return found


def unescaped(text: str) -> str:
    for letter, escape in ((",", "%2C"), (":", "%3A"), ("\n", "%0A"), ("\r", "%0D"), ("%", "%25")):
        text = text.replace(escape, letter)
    return text


def test_annotations_stand_on_the_line() -> None:
    first = commands(to_github(saved("overflow")))[0]
    assert first[0] == "error"
    assert first[1]["file"] == "examples/t5_feed_forward.py"
    assert int(first[1]["line"]) > 1
    assert first[1]["title"] == "AMP101 overflow"
    assert "blocks.1.wo/linear" in first[2]
    assert "\n" in first[2]


def test_only_as_many_annotations_as_are_shown() -> None:
    text = to_github(replace(many(saved_report(), 500), combined=None))
    assert len(commands(text)) == 10
    assert "490 more" in text


def test_failed_targets_are_annotations() -> None:
    found = commands(to_github(saved("check")))
    assert [c for c, _, _ in found].count("error") == 3
    assert any("no such file" in text for _, _, text in found)


# Markdown


def rendered_text(text: str) -> str:
    """What a reader of the rendered page sees, tags aside."""
    html = MarkdownIt("gfm-like", {"html": True, "linkify": False}).disable("linkify").render(text)
    return unescape(re.sub(r"<[^>]*>", "", html))


@pytest.mark.parametrize("name", WITH_FINDINGS)
def test_markdown_says_the_verdict_first(name: str) -> None:
    text = to_markdown(saved(name))
    head = text.splitlines()[0]
    assert head.startswith(("## ✅ PASS", "## ❌ FAIL", "## ⚠ WARN", "## Policies side by side"))
    html = MarkdownIt("gfm-like", {"linkify": False}).disable("linkify").render(text)
    assert text.count("\n|---") == html.count("<table>")  # every table is one


def test_markdown_names_the_place_and_the_line() -> None:
    text = to_markdown(saved("overflow"))
    assert "| error | AMP101 overflow | `blocks.1.wo/linear` | `examples/t5_feed_forward.py:36` |" in text
    assert "Nearest the limit" in text


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_only_text_in_markdown(name: str) -> None:
    for shown in (code(name), escaped(name)):
        html = (
            MarkdownIt("gfm-like", {"html": True, "linkify": False})
            .disable("linkify")
            .render(f"| a |\n|---|\n| {shown} |")
        )
        assert set(re.findall(r"<(\w+)", html)) <= {"table", "thead", "tbody", "tr", "th", "td", "code"}
        cell = unescape(re.search(r"<td>(.*?)</td>", html, re.S)[1])  # type: ignore[index]
        assert re.sub(r"</?code>", "", cell).strip() == escape_control(name).strip()


# CSV


def test_csv_has_a_row_per_site_and_numbers_that_come_back() -> None:
    report = saved_report()
    rows = list(csv.DictReader(io.StringIO(to_csv(report))))
    assert [row["site"] for row in rows] == [site.site for site in report.sites]
    for row, site in zip(rows, report.sites, strict=True):
        if site.forward is not None:
            assert float(row["peak"]) == site.forward.peak
            assert int(row["inf"]) == site.forward.inf
        else:
            assert row["peak"] == ""
        assert (float(row["bound"]) if row["bound"] else None) == site.bound
    assert next(row for row in rows if row["site"] == "blocks.1.wo/linear")["findings"] == "AMP101"
    assert {row["dtype"] for row in rows} == {"float16"}


@pytest.mark.parametrize("name", ["policies", "gradients", "training", "plan", "ranges", "bench"])
def test_csv_of_other_reports_is_rectangular(name: str) -> None:
    rows = list(csv.reader(io.StringIO(to_csv(saved(name)))))
    assert len(rows) > 5
    assert {len(row) for row in rows} == {len(rows[0])}
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", column) for column in rows[0])


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t"])
def test_a_spreadsheet_runs_no_name(start: str) -> None:
    rows = csv.DictReader(io.StringIO(to_csv(named(saved_report(), f"{start}SUM(A1)"))))
    assert all(not row["layer"].startswith(("=", "+", "-", "@", "\t")) for row in rows)


# all of them


def test_commands_in_reports_are_safe_to_paste() -> None:
    name = "u; rm -rf ~ $(id)'`id`.py"
    check = saved("check")
    assert isinstance(check, CheckResults)
    target = replace(next(target for target in check.targets if target.breaches), target=name)
    messages = [message for _, _, message in commands(to_github(replace(check, targets=(target,))))]
    found = [message.splitlines()[-1].removeprefix("for details, run: ") for message in messages]
    assert {tuple(shlex.split(command)) for command in found} == {("ampaudit", "scan", name)}
    stressed = (StressResult(SiteId("a"), 1.0, 2.0, True, name),)
    rows = summary_rows(replace(saved_report(), stressed=stressed), 0)
    (text,) = (text for label, text in rows if label == "Stress")
    assert shlex.split(text.partition("overflows: ")[2]) == ["--inputs", name]


@pytest.mark.parametrize("form", [*MACHINES, "text"])
@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_break_no_format(form: str, name: str) -> None:
    report = named(saved_report(), name)
    if form == "text":
        stream = io.StringIO()
        Console(file=stream, width=100).print(for_terminal(report, 1))
        assert "\x1b" not in stream.getvalue()
        return
    text = as_file(report, form)
    text.encode("utf-8")
    if form == "json":  # for machines: every name as it is, unless strict parsers refuse it
        readable = re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):x}", name)
        assert json.loads(text)["sites"][0]["layer"] == readable
        return
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
    if form == "sarif":
        sarif_schema().validate(json.loads(text))
    elif form == "junit":
        assert JUnitXml.fromstring(text.encode()).failures >= 1
    elif form == "github":
        assert {command for command, _, _ in commands(text)} <= {"error", "warning", "notice"}
        assert len(commands(text)) == len(report.findings) + (report.combined is not None)
    elif form == "csv":
        assert {len(row) for row in csv.reader(io.StringIO(text))} == {
            len(next(csv.reader(io.StringIO(text))))
        }


@given(st.text(min_size=1, max_size=40))
def test_any_name_comes_back_from_xml_sarif_and_csv(name: str) -> None:
    base = saved_report()
    report = named(replace(base, sites=base.sites[:2], findings=base.findings[:1]), name)
    shown = escape_control(name)
    case = next(iter(next(iter(JUnitXml.fromstring(to_junit(report).encode())))))
    assert case.name == shown
    result = json.loads(to_sarif(report))["runs"][0]["results"][0]
    assert result["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == f"{shown}/op"
    row = next(csv.DictReader(io.StringIO(to_csv(report))))
    assert row["layer"].removeprefix("'") == shown.removeprefix("'")


@pytest.mark.parametrize("form", MACHINES)
def test_a_report_without_findings_or_sites(form: str) -> None:
    report = saved_report()
    empty = replace(report, findings=(), sites=(), outputs=(), verdict="pass", timings={}, combined=None)
    text = as_file(empty, form)
    assert "AMP101" not in text or form == "html"


def test_twenty_thousand_findings_stay_readable() -> None:
    report = many(saved_report(), 20_000)
    assert len(to_markdown(report)) < 100_000
    html = as_file(report, "html")
    assert "19,000 more findings" in html
    assert len(html) < 5_000_000
    stream = io.StringIO()
    Console(file=stream, width=100).print(for_terminal(report))
    assert stream.getvalue().count("\n") < 2000


@pytest.mark.parametrize("wanted", ["plan sarif", "plan junit", "bench github"])
def test_what_a_report_cannot_be_is_a_clear_error(wanted: str) -> None:
    name, form = wanted.split()
    with pytest.raises(UsageError) as caught:
        as_file(saved(name), form)
    assert "use --format" in caught.value.hint


@pytest.mark.parametrize("name", NAMES)
def test_json_is_what_was_read(name: str) -> None:
    assert json.loads(as_file(saved(name), "json")) == json.loads(text_of(name))


def test_suffixes_choose_formats() -> None:
    assert chosen_format(None, None) == "text"
    assert chosen_format("sarif", Path("x.html")) == "sarif"
    found = {
        suffix: chosen_format(None, Path(f"x{suffix}"))
        for suffixes in OUTPUT_FORMATS.values()
        for suffix in suffixes
    }
    assert found == {suffix: form for form, suffixes in OUTPUT_FORMATS.items() for suffix in suffixes}
    assert chosen_format(None, Path("report.txt")) == "text"
    assert chosen_format(None, Path("R.HTML")) == "html"


def test_notes_are_not_failures() -> None:
    report = saved_report()
    notes: tuple[Finding, ...] = tuple(replace(f, severity=Severity.NOTE) for f in report.findings)
    noted = replace(report, findings=notes, verdict="pass")
    assert JUnitXml.fromstring(to_junit(noted).encode()).failures == 0
    assert {r["level"] for r in sarif_of(noted)["runs"][0]["results"]} == {"note"}
    assert {command for command, _, _ in commands(to_github(noted))} == {"notice"}


def test_the_documented_table_of_formats_is_right() -> None:
    text = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line[:3] == "| `"
    ]
    formats = {row[0].strip("`") for row in rows}
    assert formats == OUTPUT_FORMATS.keys(), "docs/reports.md: give each format a row of the table"
    kinds = {command: command for command in ("scan", "check", "plan", "bench", "lint", "diff")}
    kinds |= {"train": "training", "tune": "tuning", "verify": "verification"}
    assert formats_of("comparison") == formats_of("scan"), (
        "a scan with several policies has the formats of a scan"
    )
    for row in rows:
        form = row[0].strip("`")
        suffixes = OUTPUT_FORMATS[form]
        assert (row[1].strip("`") in suffixes) if suffixes else row[1] in ("", "any other")
        listed = kinds if row[3] == "all" else row[3].split(", ")
        assert set(listed) == {command for command, kind in kinds.items() if form in formats_of(kind)}, form
