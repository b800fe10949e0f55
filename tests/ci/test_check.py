"""``ampaudit check``: budgets, baselines, several targets, and models that hang, eat memory or die."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

import ampaudit
from ampaudit import scan
from ampaudit.audit.metric import metric_of
from ampaudit.ci.check import check_all
from ampaudit.ci.config import CheckConfig, read_config
from ampaudit.ci.judge import check_codes, judge, known_target, measured_in
from ampaudit.core import __version__
from ampaudit.core.child import ChildLimits
from ampaudit.core.errors import UsageError
from ampaudit.core.session import Session, silent
from ampaudit.core.text import parse_size
from ampaudit.export.manifest import read_manifest
from ampaudit.linter.config import LintConfig
from ampaudit.linter.selection import RuleSelection
from ampaudit.report.check import Budgets, Measurements, Request, TargetResult
from ampaudit.report.model import Report
from ampaudit.source import Batch, ModelSource
from tests.support.converted import converted, tied
from tests.support.paths import ROOT

Cli = Callable[..., subprocess.CompletedProcess[str]]
HEAD = "import os, time, torch\nfrom torch import nn\ndef example_inputs(): return torch.randn(4, 8)\n"
GOOD = HEAD + "def get_model(): return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))\n"
BAD = HEAD + (
    "class Square(nn.Module):\n    def forward(self, x): return (x * 1000) * x * x\n"
    "def get_model(): return Square()\ndef example_inputs(): return torch.full((4, 8), 9.0)\n"
)


@pytest.fixture(scope="module")
def report() -> Report:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
    return scan(model, torch.randn(4, 8), policy="torch-cuda")


@pytest.fixture(scope="module")
def broken() -> Report:
    model = torch.nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.fill_(5000.0)
    return scan(model, torch.full((4, 8), 10.0), policy="half")


def names(report: Report, baseline: Report | None = None, **budgets: object) -> list[str]:
    made = Budgets(**budgets)
    known = known_target("", baseline, measured_in(baseline), made) if baseline is not None else None
    return [b.budget for b in judge(report, measured_in(report), made, known).breaches]


def test_what_is_measured(report: Report) -> None:
    seen = measured_in(report)
    assert seen.headroom_bits is not None
    peaks = [
        site.forward.headroom_bits
        for site in report.sites
        if site.forward and site.precision == "float16" and site.role != "weight-cast" and not site.by_design
    ]
    assert seen.headroom_bits == min(bits for bits in peaks if bits is not None)
    assert seen.sqnr_db == report.outputs[0].sqnr_db
    assert seen.fp32_share == pytest.approx(1 / 3)


def test_budgets_are_held(report: Report) -> None:
    seen = measured_in(report)
    assert seen.headroom_bits is not None
    assert seen.sqnr_db is not None
    assert names(report) == []
    assert names(report, min_headroom=seen.headroom_bits, min_sqnr=seen.sqnr_db, max_fp32_share=0.34) == []
    assert names(report, min_headroom=seen.headroom_bits + 0.01) == ["min-headroom"]
    assert names(report, min_sqnr=seen.sqnr_db + 0.01) == ["min-sqnr"]
    assert names(report, max_fp32_share=0.33) == ["max-fp32-share"]


def test_findings_count_unless_allowed(broken: Report) -> None:
    (code,) = names(broken)
    assert code.startswith("AMP1")
    assert names(broken, allow=(code,)) == []
    assert names(broken, fail_on="never") == []


def test_a_broken_output_has_no_accuracy_even_if_its_cause_is_allowed(broken: Report) -> None:
    (code,) = names(broken)
    assert measured_in(broken).broken == ("output",)
    assert names(broken, allow=(code,), min_sqnr=10.0) == ["min-sqnr"]
    assert names(broken, broken, min_sqnr=10.0) == []


def test_a_limit_that_nothing_exceeds_is_refused() -> None:
    with pytest.raises(UsageError, match="--min-headroom nan"):
        Budgets(min_headroom=float("nan"))


def test_a_baseline_lets_the_known_pass(report: Report, broken: Report) -> None:
    assert names(broken, broken) == []
    assert names(broken, report) != []
    assert names(report, broken) == []


@pytest.mark.parametrize(
    ("field", "budget", "worse", "slightly"),
    [("headroom_bits", "min_headroom", 0.2, 0.01), ("sqnr_db", "min_sqnr", 2.0, 0.1)],
)
def test_a_baseline_lets_numbers_vary_a_little(
    report: Report, field: str, budget: str, worse: float, slightly: float
) -> None:
    old = measured_in(report)
    budgets = Budgets(**{budget: 1000.0})
    known = known_target("", report, old, budgets)
    for less, counts in ((worse, True), (slightly, False), (-worse, False)):
        seen = replace(old, **{field: getattr(old, field) - less})
        assert bool(judge(report, seen, budgets, known).breaches) is counts


@pytest.mark.parametrize(
    ("fp32", "lower", "breached"), [(0.9, 0.88, True), (0.9, 0.895, False), (0.9, float("-inf"), True)]
)
def test_the_metric_may_fall_a_little(report: Report, fp32: float, lower: float, breached: bool) -> None:
    seen = Measurements(metric_fp32=fp32, metric_lower=lower)
    found = judge(report, seen, Budgets(max_metric_drop=0.01)).breaches
    assert bool(found) is breached


def test_a_metric_that_is_nan_in_fp32_is_said_to_be(report: Report) -> None:
    seen = Measurements(metric_fp32=-math.inf, metric_lower=-math.inf)
    (breach,) = judge(report, seen, Budgets(max_metric_drop=0.01)).breaches
    assert breach.what == "NaN or infinite in FP32 already: there is no drop to compare"


def test_a_baseline_accepts_a_drop_of_the_metric(report: Report) -> None:
    budgets = Budgets(max_metric_drop=0.01)
    known = known_target("", report, Measurements(metric_fp32=0.9, metric_lower=0.8), budgets)
    for lower, counts in ((0.8, False), (0.795, False), (0.85, False), (0.78, True), (-math.inf, True)):
        judged = judge(report, Measurements(metric_fp32=0.9, metric_lower=lower), budgets, known)
        assert bool(judged.breaches) is counts, lower
        assert len(judged.breaches) + len(judged.known) == 1
    never = replace(known, measured=Measurements())
    assert judge(report, known.measured, budgets, never).breaches, "a drop that it does not know"


def test_the_metric_sees_both_outputs_in_their_structure() -> None:
    batch = Batch((), {"x": torch.ones(2)})
    calls = []

    def metric(output: dict[str, tuple[torch.Tensor, str]], given: dict[str, torch.Tensor]) -> float:
        calls.append((output, given))
        return float(output["y"][0].sum())

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, tuple[torch.Tensor, str]]:
            return {"y": (x * 2, "kept")}

    source = ModelSource("m", "python", Model(), (batch,), metric=metric)
    pairs = {0: {"output.y[0]": (torch.tensor([2.0, 2.0]), torch.tensor([2.0, 1.5]))}}
    assert metric_of(source, pairs) == (4.0, 3.5)
    assert calls[1][0]["y"][1] == "kept"
    assert calls[1][1] is batch.kwargs


def test_the_metric_of_16_bits_is_that_of_the_16_bit_model() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    kept = {}
    scan(model, x, policy="half", session=Session(keep_outputs=kept.__setitem__))
    exact, lower = kept[0]["output"]
    assert torch.equal(exact, model(x))
    wide = torch.nn.functional.linear(
        x.half().float(), model.weight.half().float(), model.bias.half().float()
    )
    assert torch.equal(lower, wide.half().float())


# -- configuration


def config(tmp_path: Path, text: str) -> Path:
    (tmp_path / "pyproject.toml").write_text(text)
    return tmp_path / "pyproject.toml"


def test_configuration(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(GOOD)
    text = '[tool.ampaudit]\ntargets = ["m.py", "m.py:get_model", "pkg.mod:f"]\nmin-headroom = 2\n'
    text += 'baseline = "b.json"'
    found = read_config(config(tmp_path, text))
    assert found["min_headroom"] == 2
    assert found["baseline"] == tmp_path / "b.json"
    assert found["targets"] == [f"{tmp_path}/m.py", f"{tmp_path}/m.py:get_model", "pkg.mod:f"]
    assert read_config(config(tmp_path, "[tool.other]\na = 1")) == {}
    (tmp_path / "n.py").write_text(GOOD)
    globbed = read_config(config(tmp_path, '[tool.ampaudit]\ntargets = ["?.py"]'))["targets"]
    assert globbed == [f"{tmp_path}/m.py", f"{tmp_path}/n.py"]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("[tool.ampaudit]\nmin-hedroom = 2", "min-hedroom: no such key", "did you mean 'min-headroom'"),
        ('[tool.ampaudit]\nmin-sqnr = "40"', "min-sqnr = '40'", "it must be a number"),
        ("[tool.ampaudit]\nmax-fp32-share = 50", "max-fp32-share = 50", "from 0 to 1"),
        ("[tool.ampaudit]\ntrust = true", "trust: no such key", ""),
        ("[tool.ampaudit]\njobs = true", "jobs = True", "whole number"),
        ("[tool.ampaudit]\njobs = 0", "jobs = 0", "above 0"),
        ("[tool.ampaudit]\nmin-sqnr = nan", "min-sqnr = nan", "a number"),
        ("[tool.ampaudit]\ntimeout = -1", "timeout = -1", "above 0"),
        ("[tool]\nampaudit = 3", "is not a table", "write"),
        ('[tool.ampaudit]\ntargets = ["nothing*.py"]', "nothing matches 'nothing*.py'", "pattern"),
        (f'[tool.ampaudit]\ntargets = ["{"m" * 300}/*.py"]', "File name too long", "pattern"),
        ('[tool.ampaudit]\ntargets = ["a/**py"]', "Invalid pattern", "pattern"),
        ("[tool.ampaudit\n", "not valid TOML", "correct"),
    ],
)
def test_mistakes_in_the_configuration(tmp_path: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_config(config(tmp_path, text))
    assert message in caught.value.args[0]
    assert hint in caught.value.hint


def test_a_long_name_is_shortened_in_messages(tmp_path: Path) -> None:
    for refused in (
        lambda: CheckConfig(dtype="b" * 900),
        lambda: check_codes(["A" * 900]),
        lambda: RuleSelection.of(LintConfig(ignore=["AMP" + "8" * 900])),
        lambda: read_config(config(tmp_path, f'[tool.ampaudit]\ntargets = ["{"m" * 900}*.py"]')),
    ):
        with pytest.raises(UsageError) as caught:
            refused()
        assert len(str(caught.value)) < 500 + len(str(tmp_path))


def test_a_pattern_may_be_absolute(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c.txt"):
        (tmp_path / name).touch()
    found = read_config(config(tmp_path, f'[tool.ampaudit]\ntargets = ["{tmp_path.as_posix()}/*.py"]'))
    assert found["targets"] == [str(tmp_path / "a.py"), str(tmp_path / "b.py")]
    assert found == read_config(config(tmp_path, '[tool.ampaudit]\ntargets = ["*.py"]'))


@pytest.mark.parametrize(
    ("text", "size"), [("4GB", 4 * 10**9), ("500 mb", 5 * 10**8), ("2GiB", 2 << 30), ("1.5k", 1500)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "4 parsecs", "-", "4XB", "infGB", "0GB", "-1GB"])
def test_texts_that_are_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a valid size"):
        parse_size(text)


@pytest.mark.parametrize(
    "options", [{"policy": "half,apex-o2"}, {"seed": 2**63 - 5}, {"seed": 10**30}, {"max_memory": ""}]
)
def test_options_that_no_audit_can_take(tmp_path: Path, options: dict[str, Any]) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    try:
        (result,) = ampaudit.check(tmp_path / "good.py", **options).targets
    except UsageError:
        return
    assert result.exit_code == 2
    assert result.error.startswith("unknown policy 'half,apex-o2'")


def test_codes_are_known() -> None:
    check_codes(("AMP101",))
    with pytest.raises(UsageError, match="no such check"):
        check_codes(("AMP1O1",))
    for near in ("AMP10", "amp101"):
        with pytest.raises(UsageError, match="did you mean 'AMP101'"):
            check_codes((near,))


# -- processes


def check(
    *targets: Path | str, jobs: int = 2, limits: ChildLimits | None = None, **budgets: object
) -> list[TargetResult]:
    requests = [Request(str(target), {"policy": "half"}, budgets) for target in targets]
    return check_all(requests, jobs, limits or ChildLimits(), silent)


def written(tmp_path: Path, files: dict[str, str]) -> list[Path]:
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    return [tmp_path / f"{name}.py" for name in files]


def test_whatever_a_model_does_the_others_go_on(tmp_path: Path) -> None:
    files = {
        "good": GOOD,
        "bad": BAD,
        "eats": HEAD + "def get_model():\n    kept = []\n    while True: kept.append(torch.ones(1 << 20))\n",
        "dies": HEAD + "os._exit(7)\n",
        "killed": HEAD + "os.kill(os.getpid(), 9)\n",
        "raises": HEAD + "def get_model(): return 1 / 0\n",
        "garbles": HEAD + "def get_model(): raise ValueError('half \\udc80')\n",
        "shouts": GOOD + "print('{}'); import sys; print('x' * 100_000, file=sys.stderr)\n",
    }
    paths = written(tmp_path, files)
    results = check(*paths, tmp_path / "gone.py", jobs=2, limits=ChildLimits(memory=1_500_000_000))
    found = dict(zip([*files, "gone"], results, strict=True))
    assert {name: (r.verdict, r.exit_code) for name, r in found.items()} == {
        "good": ("pass", 0),
        "bad": ("fail", 1),
        "eats": ("error", 3),
        "dies": ("error", 3),
        "killed": ("error", 3),
        "raises": ("error", 2),
        "garbles": ("error", 2),
        "shouts": ("pass", 0),
        "gone": ("error", 2),
    }
    assert "1.5 GB are allowed" in found["eats"].error
    assert "exit code 7" in found["dies"].error
    assert "SIGKILL" in found["killed"].error
    assert "ZeroDivisionError" in found["raises"].error
    assert "ValueError: half \udc80" in found["garbles"].error
    for result in found.values():
        assert result.exit_code < 2 or "next:" in result.error


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    for options in ({}, {"weights": tmp_path / os.fsdecode(b"w\xff")}):
        target = "good.py" if options else os.fsdecode(b"b\xff.py")
        with pytest.raises(UsageError, match=r"\\udcff.*: the name is not UTF-8 text"):
            ampaudit.check(target, **options)


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is imported ahead")
def test_a_pass_counts_what_is_allowed(tmp_path: Path) -> None:
    (path,) = written(tmp_path, {"bad": BAD})
    (result,) = check(path)
    assert {breach.budget for breach in result.breaches} == {"AMP101"}
    assert result.notes == ()
    (result,) = check(path, allow=["AMP101"])
    assert (result.verdict, result.notes) == ("pass", ("ignored: 1 error",))


def test_what_an_audit_imports_is_imported_once(tmp_path: Path) -> None:
    code = HEAD + (
        "import sys\nloaded = set(sys.modules)\n"
        "class Late(nn.Linear):\n    def forward(self, x):\n"
        f"        open({str(tmp_path / 'late')!r}, 'w').write('\\n'.join(sys.modules.keys() - loaded))\n"
        "        return super().forward(x)\n"
        "def get_model(): return Late(8, 8)\n"
    )
    (result,) = check(*written(tmp_path, {"late": code}))
    assert result.verdict == "pass"
    late = (tmp_path / "late").read_text().split()
    assert len(late) < 20, late


def test_a_target_is_checked_once(tmp_path: Path) -> None:
    """Globs in pyproject.toml may overlap."""
    (path,) = written(tmp_path, {"good": GOOD})
    assert len(ampaudit.check([path, str(path)], policy="half").targets) == 1


@pytest.mark.parametrize("jobs", [1, 2])
def test_parallel_checks_share_the_cores(tmp_path: Path, jobs: int) -> None:
    """A single process keeps torch's default."""
    code = "import os\ndef get_model(): raise ValueError(f\"<{os.environ.get('OMP_NUM_THREADS')}>\")\n"
    targets = {f"threads_{number}": code for number in range(jobs)}
    share = str(max(1, (os.cpu_count() or 1) // jobs)) if jobs > 1 else os.environ.get("OMP_NUM_THREADS")
    for result in check(*written(tmp_path, targets), jobs=jobs):
        assert f"<{share}>" in result.error
    (result,) = check(*written(tmp_path, {"alone": code}), jobs=8)
    assert f"<{os.environ.get('OMP_NUM_THREADS')}>" in result.error


def test_a_model_that_hangs_is_stopped_with_its_children(tmp_path: Path) -> None:
    code = "import os, subprocess, sys, time\n" + (
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        "open(__file__ + '.pid', 'w').write(str(p.pid))\ntime.sleep(1000)\n"
    )
    (path,) = written(tmp_path, {"hangs": code})
    (result,) = check(path, limits=ChildLimits(seconds=8))
    assert (result.verdict, result.exit_code) == ("error", 3)
    assert "stopped after 8 s" in result.error
    child = int(Path(f"{path}.pid").read_text())
    time.sleep(0.2)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_converted_directory_is_verified_and_audited_as_it_is(tmp_path: Path) -> None:
    out = converted(tied(), tmp_path / "out", policy="torch-cuda")
    (passed,) = check(out)
    assert (passed.verdict, passed.policy) == ("pass", "as-is")
    assert passed.measured is not None
    assert passed.measured.headroom_bits is not None
    recorded = [o.sqnr_db for o in read_manifest(out).outputs if o.sqnr_db is not None]
    assert passed.measured.sqnr_db is not None
    assert passed.measured.sqnr_db <= min(recorded)
    data = bytearray((out / "master.safetensors").read_bytes())
    data[-1] ^= 1
    (out / "master.safetensors").write_bytes(data)
    (failed,) = check(out)
    assert failed.exit_code == 1
    assert {b.budget for b in failed.breaches} == {"integrity"}


# -- the program, and the examples in the documentation


def test_one_table_and_one_exit_code(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    config(tmp_path, '[tool.ampaudit]\npolicy = "half"\nmin-headroom = 1\ntargets = ["good.py"]\n')
    done = cli("check", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "PASS  1 target checked" in done.stdout
    done = cli("check", "good.py", "bad.py", "--min-headroom", "50", "-j", "2", cwd=tmp_path)
    assert done.returncode == 1
    assert "FAIL  2 of 2" in done.stdout
    done = cli("check", "bad.py", "--fail-on", "never", cwd=tmp_path)
    assert done.returncode == 1, "the limit on headroom counts still"
    assert "min-headroom" in done.stdout
    done = cli("check", "bad.py", "--fail-on", "never", "--min-headroom", "-10", cwd=tmp_path)
    assert done.returncode == 0
    assert "\nbad.py\n  AMP" in done.stdout
    assert done.stdout.endswith("FAIL  1 of 1 target\ngate  pass\n")


def test_json(tmp_path: Path, cli: Cli) -> None:
    text = HEAD + "def example_inputs(): return torch.full((4, 8), 10.0)\ndef get_model():\n"
    text += "    model = nn.Linear(8, 8)\n    model.weight.data.fill_(5000.0)\n    return model\n"
    (tmp_path / "bad.py").write_text(text)
    done = cli("check", "bad.py", "--policy", "half", "--format", "json", cwd=tmp_path)
    table = json.loads(done.stdout)
    assert (done.returncode, table["verdict"]) == (1, "fail")
    assert table["targets"][0]["breaches"][0]["budget"].startswith("AMP")


def test_nothing_to_check(tmp_path: Path, cli: Cli) -> None:
    done = cli("check", cwd=tmp_path)
    assert done.returncode == 2
    assert "no target" in done.stderr
    done = cli("check", "m.py", "--min-sqnr", "nan", cwd=tmp_path)
    assert done.returncode == 2
    assert "not a valid limit" in done.stderr


def ci_copy(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "model.py"):
        (tmp_path / name).write_text((ROOT / "examples" / "ci" / name).read_text())
    return tmp_path


def test_the_github_workflow_pins_what_it_runs() -> None:
    text = (ROOT / "examples" / "ci" / "github-actions.yml").read_text()
    used = re.findall(r"uses: (\S+)(.*)", text)
    assert len(used) == 4
    for action, comment in used:
        assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action
    (installed,) = re.findall(r"ampaudit @ (\S+)\"", text)
    assert installed == f"git+https://github.com/OWNER/ampaudit@v{__version__}"


SCALES = [("1.0", 0), ("1e6", 1)]


@pytest.mark.parametrize(("scale", "code"), SCALES)
def test_the_github_workflow_runs(tmp_path: Path, scale: str, code: int) -> None:
    workflow = yaml.safe_load((ROOT / "examples" / "ci" / "github-actions.yml").read_text())
    steps = [step["run"] for step in workflow["jobs"]["check"]["steps"] if "run" in step]
    steps = [step for step in steps if step.startswith("ampaudit")]
    folder = ci_copy(tmp_path)
    text = (folder / "model.py").read_text()
    (folder / "model.py").write_text(text.replace("torch.randn(32, 64)", f"torch.randn(32, 64) * {scale}"))
    program = folder / "bin" / "ampaudit"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ampaudit "$@"\n')
    program.chmod(0o755)
    own = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
    }
    done = [
        subprocess.run(
            ["bash", "-e", "-c", step],
            cwd=folder,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            check=False,
        )
        for step in steps
    ]
    assert [one.returncode for one in done] == [code, 0], [one.stderr for one in done]
    (target,) = json.loads((folder / "precision.json").read_text())["targets"]
    assert target["verdict"] == ("fail" if code else "pass")
    assert target["measured"]["metric_fp32"] is not None
    assert ("::error file=model.py,line=" in done[1].stdout) == bool(code)
    assert (folder / "summary.md").read_text().startswith("## ❌ FAIL" if code else "## ✅ PASS")
    results = json.loads((folder / "precision.sarif").read_text())["runs"][0]["results"]
    assert bool(results) == bool(code)
    assert all(
        r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "model.py" for r in results
    )
    assert (folder / "precision.xml").read_text().count("<failure") == code


@pytest.mark.parametrize(("scale", "code"), SCALES)
def test_the_pre_commit_hook_runs(tmp_path: Path, scale: str, code: int) -> None:
    """As pre-commit runs it, but for the environment: this one, instead of one that it would make."""
    hook = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())[0]
    assert hook["id"] == "ampaudit-check"
    entry = hook["entry"].replace("ampaudit", f"{sys.executable} -m ampaudit", 1)
    hooks = [{**hook, "entry": entry, "language": "system"}]
    folder = ci_copy(tmp_path)
    (folder / ".pre-commit-config.yaml").write_text(
        yaml.safe_dump({"repos": [{"repo": "local", "hooks": hooks}]})
    )
    text = (folder / "model.py").read_text()
    (folder / "model.py").write_text(text.replace("torch.randn(32, 64)", f"torch.randn(32, 64) * {scale}"))
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    run = [sys.executable, "-m", "pre_commit", "run", "--all-files", "--verbose"]
    done = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("PASS  1 target checked" if code == 0 else "FAIL  1 of 1") in done.stdout
