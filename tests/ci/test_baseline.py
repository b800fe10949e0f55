"""``ampaudit check --baseline``: what is known passes, what is new or worse counts, and nothing is hidden."""

from __future__ import annotations

import csv
import io
import json
import math
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampaudit.ci.judge import judge, known_target, measured_in
from ampaudit.ci.worker import check_target
from ampaudit.findings.finding import Severity
from ampaudit.findings.pages import all_pages
from ampaudit.report.check import Baseline, Budgets, KnownFinding, KnownTarget, Measurements, Request
from ampaudit.report.documents import read_baseline
from ampaudit.report.model import Report
from tests.support.saved import saved_report

Cli = Callable[..., subprocess.CompletedProcess[str]]
# ``wide`` leaves float16 from 65,504 / 9 on; ``calm`` is a healthy site
MODEL = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(8))
    def forward(self, x):
        calm = x[1] * self.one * {calm}
        return x[0] * self.one * {wide}, calm
def example_inputs():
    return torch.linspace(1.0, 9.0, 32).reshape(4, 8).expand(2, 4, 8)
"""
UPDATE = ("--baseline", "known.json", "--update-baseline")


def model(folder: Path, name: str, *, wide: float, calm: float = 2.0) -> None:
    (folder / name).write_text(MODEL.format(wide=wide, calm=calm))


def check(cli: Cli, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    done = cli("check", "--policy", "half", *arguments, cwd=folder)
    assert done.returncode in (0, 1), done.stderr
    return done


@pytest.fixture
def known(tmp_path: Path, cli: Cli) -> Path:
    """A folder with a model that overflows by 3.2 bits, and a baseline that accepts it."""
    model(tmp_path, "a.py", wide=65504.0)
    done = check(cli, tmp_path, "a.py", *UPDATE)
    assert done.returncode == 0, done.stdout
    assert check(cli, tmp_path, "a.py").returncode == 1
    passed = check(cli, tmp_path, "a.py", "--baseline", "known.json")
    assert passed.returncode == 0
    return tmp_path


def entries(folder: Path) -> list[tuple[str, str, str]]:
    found = json.loads((folder / "known.json").read_text())["targets"]
    return [(entry["target"], entry["policy"], entry["dtype"]) for entry in found]


def test_it_does_not_hide_the_overflow_of_another_model(known: Path, cli: Cli) -> None:
    (known / "b.py").write_text((known / "a.py").read_text())
    done = check(cli, known, "b.py", "--baseline", "known.json")
    assert done.returncode == 1
    assert "the baseline has no entry under half in float16" in done.stdout


@pytest.mark.parametrize("other", [("--policy", "torch-cuda"), ("--policy", "half", "--dtype", "bfloat16")])
def test_it_is_for_one_policy_and_one_format(known: Path, cli: Cli, other: tuple[str, ...]) -> None:
    done = cli("check", "a.py", "--baseline", "known.json", *other, cwd=known)
    assert "the baseline has no entry under" in done.stdout


def test_a_known_overflow_that_is_worse_counts(known: Path, cli: Cli) -> None:
    model(known, "a.py", wide=655040.0)
    done = check(cli, known, "a.py", "--baseline", "known.json")
    assert done.returncode == 1
    assert "worse than in the baseline: -6.49 bits of headroom, -3.17 before" in " ".join(done.stdout.split())
    model(known, "a.py", wide=60000.0)  # better is no reason to fail
    assert check(cli, known, "a.py", "--baseline", "known.json").returncode == 0


def test_a_healthy_site_that_falls_beside_a_known_overflow_counts(known: Path, cli: Cli) -> None:
    model(known, "a.py", wide=65504.0, calm=700.0)
    done = check(cli, known, "a.py", "--baseline", "known.json")
    assert done.returncode == 1
    assert "headroom 3.4 bits, 11.8 in the baseline" in done.stdout
    model(known, "a.py", wide=65504.0, calm=3.0)
    assert check(cli, known, "a.py", "--baseline", "known.json").returncode == 0


@pytest.mark.parametrize("calm", [700.0, 4000.0, 7200.0])
def test_a_fall_to_little_headroom_counts_like_one_to_less_headroom(
    known: Path, cli: Cli, calm: float
) -> None:
    model(known, "a.py", wide=65504.0, calm=calm)
    done = check(cli, known, "a.py", "--baseline", "known.json")
    assert done.returncode == 1
    assert f"headroom {math.log2(65504 / (9 * calm)):.1f} bits, 11.8 in the baseline" in done.stdout
    warned = check(cli, known, "a.py", "--baseline", "known.json", "--fail-on", "warning", "--format", "json")
    (target,) = json.loads(warned.stdout)["targets"]
    breaches = [b["budget"] for b in target["breaches"] if b["where"] == "(top)/mul#2"]
    assert breaches == ["baseline" if calm == 700.0 else "AMP102"], "one place is one breach"


def test_a_known_overflow_that_reaches_another_output_counts(known: Path, cli: Cli) -> None:
    text = (known / "a.py").read_text()
    text = text.replace(
        "return x[0] * self.one * 65504.0, calm", "wide = x[0] * self.one * 65504.0\n        {}"
    )
    for line, code in (("return wide, calm", 0), ("return wide, calm + wide * 0.0", 1)):
        (known / "a.py").write_text(text.format(line))
        done = check(cli, known, "a.py", "--baseline", "known.json")
        assert done.returncode == code, done.stdout
        assert ("baseline output[1]: holds inf or NaN" in " ".join(done.stdout.split())) is bool(code)


def test_what_no_longer_occurs_is_said(known: Path, cli: Cli) -> None:
    model(known, "a.py", wide=2.0)
    done = check(cli, known, "a.py", "--baseline", "known.json")
    assert done.returncode == 0
    assert "1 of the baseline no longer found" in done.stdout
    assert "gone" in done.stdout
    assert check(cli, known, "a.py", *UPDATE).returncode == 0
    again = check(cli, known, "a.py", "--baseline", "known.json")
    assert "no longer" not in again.stdout


def test_one_file_has_all_targets_policies_and_formats_sorted(known: Path, cli: Cli) -> None:
    model(known, "0.py", wide=2.0)
    before = json.loads((known / "known.json").read_text())["targets"][0]
    check(cli, known, "0.py", "a.py", *UPDATE, "--dtype", "bfloat16")
    check(cli, known, "0.py", "--policy", "ampaudit", *UPDATE)
    assert entries(known) == [
        ("0.py", "ampaudit", "float16"),
        ("0.py", "half", "bfloat16"),
        ("a.py", "half", "bfloat16"),
        ("a.py", "half", "float16"),
    ]
    assert json.loads((known / "known.json").read_text())["targets"][3] == before


def test_the_file_depends_on_what_was_found_alone(known: Path, cli: Cli) -> None:
    text = (known / "known.json").read_text()
    check(cli, known, "a.py", *UPDATE)
    assert (known / "known.json").read_text() == text
    below = known / "below"
    below.mkdir()
    for target in ("../a.py", "../a.py:Model"):
        done = check(cli, below, target, "--baseline", "../known.json", "--update-baseline")
        assert done.returncode == 0, done.stdout
    assert entries(known) == [(name, "half", "float16") for name in ("a.py", "a.py:Model")]
    (known / "known.json").write_text(text)
    found = check(cli, below, "../a.py", "--baseline", "../known.json")
    assert found.returncode == 0, "a target is named by its path from the file"
    check(cli, below, str(known / "a.py"), "--baseline", "../known.json", "--update-baseline")
    assert (known / "known.json").read_text() == text


def test_each_format_counts_what_it_hides(known: Path, cli: Cli) -> None:
    def shown(form: str) -> str:
        return check(cli, known, "a.py", "--baseline", "known.json", "--format", form).stdout

    for form in ("text", "markdown", "github", "html"):
        assert "1 known finding" in " ".join(shown(form).split()), form
    assert [f["budget"] for f in json.loads(shown("json"))["targets"][0]["known"]] == ["AMP101"]
    assert next(csv.DictReader(io.StringIO(shown("csv"))))["known"] == "1"
    assert "(suppressed: baseline)" in shown("junit")
    (result,) = json.loads(shown("sarif"))["runs"][0]["results"]
    assert result["suppressions"] == [{"kind": "external", "justification": "baseline"}]


def test_a_gap_is_known_by_its_op(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "a.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.used, self.idle = nn.Linear(8, 8), nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        return self.used(x)\n"
        "def example_inputs():\n    return torch.ones(4, 8)\n"
    )
    assert check(cli, tmp_path, "a.py", "--fail-on", "gap").returncode == 1
    assert check(cli, tmp_path, "a.py", "--fail-on", "gap", *UPDATE).returncode == 0
    assert check(cli, tmp_path, "a.py", "--fail-on", "gap", "--baseline", "known.json").returncode == 0


def test_a_target_that_cannot_be_audited_keeps_its_entry(known: Path, cli: Cli) -> None:
    text = (known / "known.json").read_text()
    (known / "a.py").write_text("raise RuntimeError('no')\n")
    done = cli("check", "a.py", "--policy", "half", *UPDATE, cwd=known)
    assert done.returncode == 2
    assert (known / "known.json").read_text() == text


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"kind": "baseline", "targets": 3}'])
def test_what_is_no_baseline_is_refused(known: Path, cli: Cli, text: str) -> None:
    (known / "known.json").write_text(text)
    for more in ((), ("--update-baseline",)):
        done = cli("check", "a.py", "--baseline", "known.json", *more, cwd=known)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--baseline known.json" in done.stderr
        assert "--update-baseline" in done.stderr or "copy it whole" in done.stderr
    assert (known / "known.json").read_text() == text


def test_an_audit_with_a_failed_check_keeps_the_entry(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (entry,) = read_baseline(known / "known.json", "--baseline", "").targets
    request = Request(str(known / "a.py"), {"policy": "half"}, {}, (entry,), update_baseline=True)
    assert check_target(request).accepted is not None
    monkeypatch.setattr(Report, "exit_code", 3)
    result = check_target(request)
    assert (result.exit_code, result.accepted) == (3, None)


def test_a_report_is_no_baseline(known: Path, cli: Cli) -> None:
    cli("scan", "a.py", "-o", "report.json", cwd=known)
    done = cli("check", "a.py", "--baseline", "report.json", cwd=known)
    assert done.returncode == 2
    assert "not a baseline" in done.stderr


def test_a_place_that_cannot_be_written_is_refused_before_the_audit(known: Path, cli: Cli) -> None:
    (known / "a.py").write_text("raise SystemExit('it ran')\n")
    done = cli("check", "a.py", "--baseline", "missing/known.json", "--update-baseline", cwd=known)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "no such directory" in done.stderr


def test_there_must_be_a_file(known: Path, cli: Cli) -> None:
    done = cli("check", "a.py", "--update-baseline", cwd=known)
    assert done.returncode == 2
    assert "--baseline FILE" in done.stderr
    done = cli("check", "a.py", "--baseline", "none.json", cwd=known)
    assert done.returncode == 2
    assert "none.json" in done.stderr


@pytest.mark.parametrize("name", ["overflow", "gradients", "static"])
@pytest.mark.parametrize("fail_on", ["error", "warning", "note", "gap"])
def test_nothing_is_new_or_worse_than_itself(name: str, fail_on: str) -> None:
    report = saved_report(name)
    budgets = Budgets(fail_on, min_headroom=100.0, min_sqnr=1000.0, max_fp32_share=0.0)
    seen = measured_in(report)
    known = known_target("a.py", report, seen, budgets)
    judged = judge(report, seen, budgets, known)
    assert judged.breaches == judged.gone == ()
    assert judged.known == judge(report, seen, budgets).breaches
    assert judge(report, seen, replace(budgets, fail_on="error"), known).gone == ()


@pytest.mark.parametrize("name", ["overflow", "gradients", "static"])
@pytest.mark.parametrize("first", ["error", "warning", "note", "gap"])
@pytest.mark.parametrize("fewer", [{"fail_on": "never"}, {"fail_on": "error"}, {"allow": "all"}])
def test_an_update_that_counts_less_keeps_the_rest(name: str, first: str, fewer: dict[str, str]) -> None:
    report = saved_report(name)
    seen, all_codes = measured_in(report), tuple(all_pages())
    known = known_target("a.py", report, seen, Budgets(first))
    less = Budgets(first, allow=all_codes) if "allow" in fewer else Budgets(**fewer)
    updated = known_target("a.py", report, seen, less, known)
    assert set(known.findings) <= set(updated.findings)
    assert judge(report, seen, Budgets(first), updated).breaches == ()
    fixed = replace(report, findings=(), gaps=())
    assert known_target("a.py", fixed, seen, less, known).findings == (), "what is gone does not stay"


def test_an_update_does_not_accept_what_does_not_count() -> None:
    report = saved_report()
    seen, first = measured_in(report), report.findings[0]
    never = Budgets("never")
    assert known_target("a.py", report, seen, never).findings == ()
    old = KnownFinding(first.code, first.site, Severity.ERROR, 100.0)
    milder = replace(report, findings=(replace(first, severity=Severity.WARNING),))
    known = KnownTarget("a.py", "half", "float16", (old,), {}, seen)
    updated = known_target("a.py", milder, seen, never, known)
    assert updated.findings == (replace(old, severity=Severity.WARNING),)
    assert judge(report, seen, Budgets(), updated).breaches, "it was an error before, and is one again"


@given(before=st.floats(-30, 15), now=st.floats(-30, 15), severity=st.sampled_from(Severity))
def test_worse_is_lower_by_more_than_rounding(before: float, now: float, severity: Severity) -> None:
    report = saved_report()
    first = replace(report.findings[0], severity=severity)
    evidence = replace(first.evidence, headroom_bits=now, sqnr_db=None)
    report = replace(report, findings=(replace(first, evidence=evidence),), sites=(), outputs=())
    accepted = KnownFinding(first.code, first.site, Severity.WARNING, before)
    seen = Measurements()
    known = KnownTarget("a.py", "half", "float16", (accepted,), {}, seen)
    judged = judge(report, seen, Budgets("note"), known)
    graver = severity is Severity.ERROR
    assert bool(judged.breaches) is (graver or before - now > 0.05)
    assert len(judged.breaches) + len(judged.known) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers()), max_size=12))
def test_an_update_replaces_what_was_checked_alone(parts: list[tuple[str, str, int]]) -> None:
    baseline, plain = Baseline(), dict[tuple[str, str], float]()
    for target, policy, bits in parts:
        new = KnownTarget(target, policy, "float16", (), {"site": float(bits)}, Measurements())
        baseline = baseline.updated([new])
        plain[target, policy] = float(bits)
    assert [(k.target, k.policy, k.headroom["site"]) for k in baseline.targets] == [
        (*key, plain[key]) for key in sorted(plain)
    ]


def test_a_baseline_that_is_not_there_says_how_to_write_it(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.ampaudit]\ntargets = ["m.py"]\nbaseline = "known.json"\n')
    (tmp_path / "m.py").write_text("from torch import nn\n")
    done = cli("check", cwd=tmp_path)
    assert done.returncode == 2
    assert "known.json: No such file" in done.stderr
    assert "--update-baseline" in done.stderr
