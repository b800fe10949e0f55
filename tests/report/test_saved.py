"""``ampaudit report`` and ``ampaudit diff``: saved reports, good and bad, and what changed between two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampaudit.core.errors import InputError
from ampaudit.core.untrusted import MAX_MESSAGE
from ampaudit.findings.finding import Severity
from ampaudit.render.render import OUTPUT_FORMATS, as_file
from ampaudit.report.compare import diff
from ampaudit.report.conversion import Verification
from ampaudit.report.difference import Difference
from ampaudit.report.documents import parse_document, read_document
from ampaudit.report.model import Comparison, Report, SiteReport
from tests.support.saved import NAMES, PLACE, saved, saved_report, text_of

Cli = Callable[..., subprocess.CompletedProcess[str]]
WO = "blocks.1.wo/linear"


def refused(text: str) -> str:
    with pytest.raises(InputError) as caught:
        parse_document(text, "r.json")
    message = str(caught.value)
    assert message.startswith("r.json")
    assert "\n  next: " in message
    return message


def with_site(report: Report, name: str, change: Callable[[SiteReport], SiteReport]) -> Report:
    return replace(report, sites=tuple(change(s) if s.site == name else s for s in report.sites))


def only(old: Report, new: Report, **options: float) -> Difference:
    (pair,) = diff(old, new, **options).pairs
    return pair


# reading


def test_a_newer_schema_says_so() -> None:
    text = text_of("overflow").replace('"schema": 1', '"schema": 2', 1)
    assert "written by a newer ampaudit (schema 2; this one reads 1)" in refused(text)


def test_fields_of_a_later_version_are_passed_over() -> None:
    data = json.loads(text_of("overflow"))
    data["later"] = {"a": 1}
    data["findings"][0]["later"] = 2
    data["sites"][0]["later"] = [3]
    assert parse_document(json.dumps(data), "r") == saved("overflow")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
def test_a_truncated_report_is_one_clear_line(name: str, share: float) -> None:
    text = text_of(name).rstrip()
    message = refused(text[: int(len(text) * share)])
    assert "cut off" in message or "not JSON" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    "text", ["[]", "{}", "3", "null", '"x"', '{"findings": 1}', '{"a": NaN}', "[" * 100_000]
)
def test_what_is_no_report(text: str) -> None:
    refused(text)


@given(st.sampled_from(NAMES), st.data())
def test_a_field_of_another_type_never_crashes(name: str, data: st.DataObject) -> None:
    document = json.loads(text_of(name))
    field = data.draw(st.sampled_from(sorted(document)))
    document[field] = data.draw(
        st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers()))
    )
    text = json.dumps(document)
    try:
        parse_document(text, "r.json")
    except InputError:
        refused(text)  # any other error fails


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"kind": "scan", "kind": "lint"}', "'kind' occurs twice"),
        ('{"a": 1e999}', "infinite"),
        ('{"a": ' + "9" * 4000 + "}", "an integer of more than 20 digits"),
        ('{"a": "\\ud800"}', "half of a surrogate pair"),
        ('{"a":' * 200 + "1" + "}" * 200, "nested"),
        ('{"a": [' + "[]," * 5_000_000 + "[]]}", "more than 2,000,000 objects and lists"),
        ('{"\\u001b[31m' + "x" * 5000 + '": 1, "\\u001b[31m' + "x" * 5000 + '": 1}', "occurs twice"),
    ],
    ids=lambda text: text[:20],
)
def test_json_that_could_hurt(text: str, what: str) -> None:
    message = refused(text)
    assert what in message
    assert len(message.split("\n")[0]) <= MAX_MESSAGE
    assert message.replace("\n", "").isprintable()


def _emptied(document: Any) -> None:
    document["reports"] = []


def _negative_peaks(document: Any) -> None:
    for variant in document["variants"]:
        for parameter in variant["health"]["parameters"]:
            parameter["gradient_peaks"] = [-1.0, 2.0]


def _endless_loss(document: Any) -> None:
    steps = document["variants"][0]["health"]["steps"]
    steps[0]["loss"], steps[1]["loss"] = -1e308, 1e308


def _other_format(document: Any) -> None:
    *_, site = (site for site in document["sites"] if site["what_if"])
    del site["what_if"]["float16"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("policies", _emptied),
        ("training", _negative_peaks),
        ("training", _endless_loss),
        ("ranges", _other_format),
    ],
)
def test_numbers_and_tables_that_no_run_makes(name: str, change: Callable[[Any], None]) -> None:
    """Types allow them, and what renders them would fail: "math domain error"."""
    document = json.loads(text_of(name))
    change(document)
    assert "holds values that no run produces" in refused(json.dumps(document))


def test_a_field_with_a_hostile_name_is_named_briefly(tmp_path: Path) -> None:
    document = json.loads(text_of("overflow"))
    document["run"] = {"\x1b[31m\u202e" * 9999: 1}
    document["sites"][0]["site"] = {"\x1b]8;;x\x07" * 9999: 1}
    message = refused(json.dumps(document))
    assert len(message.split("\n")[0]) <= MAX_MESSAGE
    assert message.replace("\n", "").isprintable()


def test_what_is_too_large_or_no_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large.json").open("wb") as stream:
        stream.truncate(10**9)  # a hole: no bytes on disk
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "link.json").symlink_to("/dev/zero")
    for name, what in (("large", "larger than"), ("fifo", "not a regular"), ("link", "not a regular")):
        with pytest.raises(InputError, match=what):
            read_document(tmp_path / f"{name}.json")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00{")
    for name, part in (("gone.json", "No such file"), ("binary.json", "not UTF-8"), (".", "directory")):
        with pytest.raises(InputError, match=part):
            read_document(tmp_path / name)


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text_of("overflow"), encoding="utf-8-sig")
    assert read_document(tmp_path / "r.json") == saved("overflow")


# differences


def test_a_report_of_a_file_whose_name_is_not_utf8_can_be_read(tmp_path: Path) -> None:
    name = os.fsdecode(b"mod\xe8le\xf0\x9f\x99\x82.py")
    path = tmp_path / "report.json"
    report = saved_report()
    replace(report, model=replace(report.model, source=name)).save(path)
    found = read_document(path)
    assert isinstance(found, Report)
    assert found.model.source == "mod\\udce8le\N{SLIGHTLY SMILING FACE}.py"
    assert replace(found, model=report.model) == report


def test_a_report_does_not_differ_from_itself() -> None:
    report = saved_report()
    pair = only(report, report)
    assert pair.changes == pair.added == pair.removed == pair.notes == ()
    assert pair.same == len(report.sites)
    assert diff(report, report).exit_code == 0


def test_two_models_without_a_common_site_are_not_compared() -> None:
    report = saved_report()
    other = replace(report, sites=tuple(replace(site, site=f"other/{site.site}") for site in report.sites))
    with pytest.raises(InputError, match="no site in common"):
        diff(report, other)


def test_a_new_error_is_worse_and_a_gone_one_better() -> None:
    report = saved_report()
    clean = replace(report, findings=report.findings[1:])
    worse, better = only(clean, report), only(report, clean)
    assert [(c.way, c.site) for c in worse.changes] == [("worse", WO)]
    assert worse.changes[0].what.startswith("new error AMP101")
    assert [(c.way, c.site) for c in better.changes] == [("better", WO)]
    assert diff(clean, report).exit_code == 1
    assert diff(report, clean).exit_code == 0


def test_a_note_is_neither() -> None:
    report = saved_report()
    noted = replace(report, findings=tuple(replace(f, severity=Severity.NOTE) for f in report.findings))
    clean = replace(report, findings=())
    assert {c.way for c in only(clean, noted).changes} == {"other"}
    graver = only(noted, report)
    assert {c.way for c in graver.changes} == {"worse"}
    assert {c.way for c in only(report, noted).changes} == {"better"}


def test_suppressed_findings_are_not_there() -> None:
    report = saved_report()
    hidden = replace(report, findings=tuple(replace(f, suppressed="comment: known") for f in report.findings))
    assert only(replace(report, findings=()), hidden).changes == ()


@pytest.mark.parametrize(("bits", "way"), [(-0.6, "worse"), (-0.4, None), (0.4, None), (0.6, "better")])
def test_headroom_counts_from_half_a_bit(bits: float, way: str | None) -> None:
    report = saved_report()
    site = next(s for s in report.sites if s.verdict == "proved" and s.precision == "float16" and s.forward)

    def moved(found: SiteReport) -> SiteReport:
        assert found.forward is not None
        assert found.forward.headroom_bits is not None
        return replace(
            found, forward=replace(found.forward, headroom_bits=found.forward.headroom_bits + bits)
        )

    pair = only(report, with_site(report, site.site, moved))
    assert [c.way for c in pair.changes] == ([way] if way else [])
    assert all(c.after - c.before == pytest.approx(bits) for c in pair.changes if c.after and c.before)
    assert only(report, with_site(report, site.site, moved), bits=0.3).changes != ()


def test_proofs_that_were_lost() -> None:
    report = saved_report()
    site = next(s for s in report.sites if s.verdict == "proved")
    lost = with_site(report, site.site, lambda s: replace(s, verdict="observed"))
    assert [(c.way, c.what) for c in only(report, lost).changes] == [("worse", "proved became observed")]
    assert [c.way for c in only(lost, report).changes] == ["better"]
    never = with_site(report, site.site, lambda s: replace(s, verdict="observed", bound=None))
    assert only(never, report).changes == ()  # nobody asked for proofs there


def test_repaired_values_are_not_compared() -> None:
    """After a fault the numbers are those of a run that was repaired: better than they would be."""
    policies = saved("policies")
    assert isinstance(policies, Comparison)
    broken, sound = policies.reports[0], policies.reports[2]
    pair = only(sound, broken)
    wrong = {s.site for s in broken.sites if s.verdict in ("overflows", "poisoned")}
    assert not any(c.before is not None for c in pair.changes if c.site in wrong)
    assert {c.way for c in only(broken, sound).changes} == {"better", "other"}
    assert [c.what for c in pair.changes if c.site == "output"] == ["now holds infinity or NaN"]
    back = only(broken, sound)
    assert [c.what for c in back.changes if c.site == "output"] == ["no longer holds infinity or NaN"]


def test_an_output_of_another_shape_holds_no_infinity() -> None:
    """``x[x > 0]`` has another shape if rounding changes a sign."""
    policies = saved("policies")
    assert isinstance(policies, Comparison)
    report = policies.reports[2]
    problem = "has shape (7,), in FP32 (8,)"
    first, *rest = report.outputs
    wrong = replace(report, outputs=(replace(first, sqnr_db=None, problem=problem), *rest))
    assert [(c.way, c.what) for c in only(report, wrong).changes] == [("worse", f"now {problem}")]
    assert [(c.way, c.what) for c in only(wrong, report).changes] == [("better", f"no longer {problem}")]
    assert f"{first.name} {problem}" in as_file(wrong, "html")


def test_counts_of_one_read_as_such() -> None:
    """A report with one site, against one with another besides."""
    report = saved_report()
    few = replace(report, sites=report.sites[:1])
    more = replace(report, sites=(replace(report.sites[0], precision="float64"), report.sites[1]))
    text = str(diff(few, more)), str(diff(few, few)), str(Verification("out", 1, 10, 1, 0, (), (), ()))
    assert "1 change, neither better nor worse" in text[0]
    assert "Added      1 site: " in text[0]
    assert "As before  1 site (" in text[1]
    assert "1 file, 10 B; 1 tensor" in text[2]


def test_sites_that_came_and_went() -> None:
    report = saved_report()
    fewer = replace(report, sites=report.sites[3:])
    gone = tuple(site.site for site in report.sites[:3])
    assert only(report, fewer).removed == gone
    assert only(fewer, report).added == gone


def test_other_settings_are_noted() -> None:
    report = saved_report()
    other = replace(report, run=replace(report.run, dtype="bfloat16", batches=4))
    assert only(report, other).notes == ("dtype was float16, is bfloat16", "batches was 1, is 4")


def test_several_policies_are_matched_by_name() -> None:
    policies = saved("policies")
    assert isinstance(policies, Comparison)
    shuffled = Comparison(policies.reports[::-1])
    found = diff(policies, shuffled)
    assert len(found.pairs) == 3
    assert found.exit_code == 0
    with pytest.raises(InputError, match="no policy in common"):
        diff(policies, replace(policies.reports[0], run=replace(policies.reports[0].run, policy="mine")))
    one, *others = policies.reports
    notes = diff(policies, Comparison(tuple(others))).pairs[-1].notes
    assert notes == (f"policy {one.run.policy} is only in the old file",)
    assert only(one, replace(one, run=replace(one.run, policy="mine"))).notes == (
        f"policy was {one.run.policy}, is mine",
    )


@pytest.mark.parametrize("name", ["training", "check", "plan"])
def test_only_scans_are_compared(name: str) -> None:
    with pytest.raises(InputError, match="only reports of scans"):
        diff(saved(name), saved("overflow"))


# the commands


@pytest.mark.parametrize("form", OUTPUT_FORMATS)
def test_every_format_from_the_command_line(cli: Cli, form: str) -> None:
    done = cli("report", PLACE / "overflow.json", "--format", form)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "blocks.1.wo" in done.stdout


def test_the_suffix_of_the_output_chooses(cli: Cli, tmp_path: Path) -> None:
    for suffix, begin in (
        (".html", "<!doctype html>"),
        (".sarif", "{"),
        (".xml", "<?xml"),
        (".csv", "policy,"),
        (".md", "## "),
    ):
        out = tmp_path / f"r{suffix}"
        done = cli("report", PLACE / "overflow.json", "-o", out)
        assert done.returncode == 0
        assert out.read_text().startswith(begin)
        assert "FAIL" in done.stderr
    assert cli("report", PLACE / "overflow.json", "-o", tmp_path / "r.md").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("report", "gone.json"), "gone.json: No such file"),
        (("report", "cut.json"), "cut.json:"),
        (("diff", "cut.json", "cut.json"), "cut off"),
        (("report", "plan.json", "--format", "sarif"), "kind 'plan' has no format 'sarif'"),
    ],
)
def test_mistakes_end_in_one_line(cli: Cli, tmp_path: Path, arguments: tuple[str, ...], part: str) -> None:
    (tmp_path / "cut.json").write_text(text_of("overflow")[:5000])
    (tmp_path / "plan.json").write_text(text_of("plan"))
    done = cli(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert part in done.stderr
    assert "next: " in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_diff_says_it_with_its_exit_code(cli: Cli, tmp_path: Path) -> None:
    policies = json.loads(text_of("policies"))["reports"]
    for name, report in (("bad", policies[0]), ("good", policies[2])):
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    worse = cli("diff", "good.json", "bad.json", cwd=tmp_path)
    assert worse.returncode == 1
    assert "3 worse" in worse.stdout
    better = cli("diff", "bad.json", "good.json", "-o", "d.json", cwd=tmp_path)
    assert better.returncode == 0
    assert json.loads((tmp_path / "d.json").read_text())["pairs"][0]["notes"] == [
        "policy was torch-cuda, is ampaudit"
    ]


@pytest.mark.parametrize("suffix", [".html", ".csv", ".md", ".json", ".txt", ".sarif", ".xml"])
def test_diff_takes_the_format_of_any_suffix_or_says_which_it_has(
    cli: Cli, tmp_path: Path, suffix: str
) -> None:
    policies = json.loads(text_of("policies"))["reports"]
    for name, report in (("bad", policies[0]), ("good", policies[2])):
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    done = cli("diff", "good.json", "bad.json", "-o", f"d{suffix}", cwd=tmp_path)
    if suffix in (".sarif", ".xml"):
        assert done.returncode == 2
        assert "next: end the name in .txt, .json, .html, .md or .csv" in done.stderr
        assert not (tmp_path / f"d{suffix}").exists()
    else:
        assert done.returncode == 1
        assert "3 worse, 0 better" in done.stderr
        assert "blocks.1.wo" in (tmp_path / f"d{suffix}").read_text()


def test_neither_command_needs_torch() -> None:
    code = (
        "import sys\nsys.argv = ['ampaudit', {}]\n"
        "from ampaudit.cli.main import run\n"
        "import atexit\natexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\nrun()\n"
    )
    path = str(PLACE / "overflow.json")
    for form in OUTPUT_FORMATS:
        arguments = f"'report', {path!r}, '--format', {form!r}"
        done = subprocess.run(
            [sys.executable, "-c", code.format(arguments)], capture_output=True, text=True, check=True
        )
        assert done.stderr.splitlines()[-1] == "False", form
    done = subprocess.run(
        [sys.executable, "-c", code.format(f"'diff', {path!r}, {path!r}")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.splitlines()[-1] == "False"
