"""The policy for all errors and the PyTorch code do what the report says, in a file and in real torch."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from ampaudit import read_report, scan
from ampaudit.audit.checks import Finding
from ampaudit.cli.program import main
from ampaudit.core.source_config import SourceConfig
from ampaudit.findings.finding import CombinedPolicy
from ampaudit.render.render import as_file
from ampaudit.report.model import Report
from ampaudit.source import ModelSource
from ampaudit.source.open import open_source
from tests.support.planted import WIDTH, TwoBranches

T5 = "examples/t5_feed_forward.py"
SCORES = "examples/attention_scores.py"


@cache
def advised(path: str, policy: str) -> tuple[ModelSource, Report, CombinedPolicy]:
    source = open_source(path, SourceConfig())
    report = scan(source, policy=policy, dtype="float16", advise=True)
    assert report.combined is not None
    return source, report, report.combined


def run_cli(*words: str, columns: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(main, words)


def errors(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.severity == "error"]


def run_in_torch(model: nn.Module, args: tuple[Any, ...], policy: str) -> torch.Tensor:
    """Run a model in float16 as PyTorch does without ampaudit."""
    if policy == "half":  # the code has called .half()
        halved = [x.half() if x.is_floating_point() else x for x in args]
        with torch.no_grad():
            return model(*halved)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        return model(*args)


def decibels(wanted: torch.Tensor, got: torch.Tensor) -> float:
    error = (got.double() - wanted.double()).square().sum()
    return float(10 * torch.log10(wanted.double().square().sum() / error))


@pytest.mark.parametrize(
    ("path", "policy"),
    [
        (T5, "torch-cpu"),
        (T5, "half"),
        (SCORES, "half"),
        (SCORES, "torch-cpu"),
    ],
)
def test_the_code_does_in_torch_what_the_report_promises(path: str, policy: str) -> None:
    source, report, combined = advised(path, policy)
    assert combined.outcome == "cure"
    (batch,) = source.batches
    with torch.no_grad():
        wanted = source.model(*batch.args)

    def ran(code: str) -> torch.Tensor:
        model = open_source(path, SourceConfig()).model.eval()
        model.load_state_dict(source.model.state_dict())
        exec(code or "model.half()", {"model": model})
        return run_in_torch(model, batch.args, policy)

    assert combined.code
    assert combined.after_db is not None
    assert abs(decibels(wanted, ran(combined.code)) - combined.after_db) < 4
    before = "" if policy == "half" else "pass"
    assert not ran(before).isfinite().all()
    kept = {t.code: t.outcome for f in errors(report) for t in f.tried if t.kind == "rule" and t.code}
    assert kept
    for code, outcome in kept.items():
        assert ran(code).isfinite().all() == (outcome == "cure")


class Scaled(nn.Module):
    """Buffers beyond float16: one that is not saved, and one that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.full((WIDTH,), 3e5), persistent=False)
        self.first, self.second = nn.Module(), nn.Module()
        for layer in (self.first, self.second):
            layer.register_buffer("table", self.frequencies, persistent=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1e-3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.first.table + self.second.table
        return (x * self.frequencies + x * table) * 1e-6 * self.scale


def test_the_code_keeps_every_buffer_of_a_stored_layer() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(), nn.Linear(WIDTH, WIDTH)).eval()
    x = torch.randn(8, WIDTH)
    with torch.no_grad():
        wanted = model(x)
    combined = scan(model, x, policy="half", advise=True).combined
    assert combined is not None
    assert combined.code
    exec(combined.code, {"model": model})
    kept = dict(model.named_buffers(remove_duplicate=False))
    assert len(kept) == 3
    for buffer in kept.values():
        assert torch.equal(buffer, torch.full((WIDTH,), 3e5))
    assert model[0].weight.dtype is torch.float16
    assert combined.after_db is not None
    assert abs(decibels(wanted, run_in_torch(model, (x,), "half")) - combined.after_db) < 4


@pytest.mark.parametrize("policy", ["torch-cpu", "half"])
def test_another_format_as_code(policy: str) -> None:
    source, report, _ = advised(T5, policy)
    model = open_source(T5, SourceConfig()).model.eval()
    model.load_state_dict(source.model.state_dict())
    (trial,) = (t for t in errors(report)[0].tried if t.kind == "dtype")
    (batch,) = source.batches
    with torch.no_grad():
        wanted = source.model(*batch.args)
        names: dict[str, Any] = {"model": model, "args": batch.args, "kwargs": batch.kwargs}
        if policy != "half":  # a line of the user's own program
            names["torch"] = torch
        exec(trial.code, names)
        got = names.get("output")
        got = model(*batch.args) if got is None else got
    assert trial.after_db is not None
    assert abs(decibels(wanted, got) - trial.after_db) < 4


class Cancelling(nn.Module):
    """An overflow beside a difference that only float32 keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.precise, self.large = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.precise(x + 100) - self.precise(x + 100.5), self.large(x * 3e5) * 1e-5


@pytest.mark.parametrize("name", ["mine", "torch-cuda"])
def test_another_format_is_code_only_where_autocast_does_as_well(tmp_path: Path, name: str) -> None:
    path = tmp_path / "mine.yaml"
    rule = "{id: mine/keep, match: {layer: [precise]}, cast: float32, reason: precision, why: x, source: me}"
    path.write_text(f"name: {name}\ntitle: mine\nextends: [torch-cuda]\nrules:\n  - {rule}\n")
    torch.manual_seed(0)
    model, x = Cancelling().eval(), torch.randn(4, WIDTH)
    report = scan(model, x, policy=str(path), advise=True)
    (trial,) = (t for t in errors(report)[0].tried if t.kind == "dtype")
    assert trial.outcome == "cure"
    assert trial.code == ""
    alone = scan(model.large, x * 3e5, policy=str(path), advise=True)
    (trial,) = (t for t in errors(alone)[0].tried if t.kind == "dtype")
    assert "torch.autocast" in trial.code


def test_no_code_for_a_device_that_no_parameter_names() -> None:
    class Square(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x.T

    model = nn.Sequential(Square(), nn.LayerNorm(8, elementwise_affine=False))
    report = scan(model, torch.full((8, 64), 100.0), policy="torch-cuda", dtype="float16", advise=True)
    assert "cure" in {trial.outcome for trial in errors(report)[0].tried}
    assert all(trial.code == "" for trial in errors(report)[0].tried)


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_one_policy_cures_all_and_every_part_of_it_is_needed(policy: str, tmp_path: Path) -> None:
    source, report, combined = advised(T5, policy)
    assert len(errors(report)) > 1
    assert all(t.outcome == "fix" for f in errors(report) for t in f.tried if t.kind == "rule")
    path = tmp_path / "all.yaml"
    path.write_text(combined.text, encoding="utf-8")
    after = scan(source, policy=str(path), dtype="float16")
    assert after.verdict == "pass"
    assert after.run.policy == combined.name
    assert after.worst_output is not None
    assert after.worst_output.accuracy_db == pytest.approx(combined.after_db, abs=0.01)
    sites = ["blocks.1.wo/linear", "blocks.2.wo/linear"]
    assert json.dumps(sites) in combined.text
    for site in sites:
        path.write_text(combined.text.replace(json.dumps(sites), json.dumps([site])), encoding="utf-8")
        assert errors(scan(source, policy=str(path), dtype="float16"))


class Cast(nn.Module):
    """An overflow that no rule prevents beside one that a rule does."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = TwoBranches(left=6e4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.branches(x), (x * 1e6).half().float() * 1.0


def test_what_no_rule_cures_is_named() -> None:
    report = scan(Cast().eval(), torch.randn(4, WIDTH) * 3, policy="torch-cuda", advise=True)
    combined = report.combined
    assert combined is not None
    assert len(errors(report)) == 2
    assert combined.outcome == "fix"
    assert combined.title == "One policy for some of the errors"
    assert combined.left == ("AMP101 at (top)/to",)
    assert combined.in_words.endswith(": these errors are left: AMP101 at (top)/to")
    assert "branches.left.up/linear" in combined.text
    assert combined.code == ""


def test_nothing_to_cure_and_nothing_that_cures() -> None:
    x = torch.randn(4, WIDTH)
    assert scan(TwoBranches().eval(), x, policy="torch-cuda", advise=True).combined is None

    class Huge(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.half().float() * 1.0

    report = scan(Huge(), torch.full((2, 4), 1e6), policy="torch-cuda", advise=True)
    assert errors(report)
    assert report.combined is None


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_names_of_all_kinds_are_safe_in_the_file_and_in_the_code(policy: str, tmp_path: Path) -> None:
    names = ['a*b?"[x]', "ünï\\slash: {y}", "KEPT CAST HALF😀\u200b\x7f"]
    model = nn.Sequential()
    for name in names:
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            layer.weight.mul_(6e4)
        model.add_module(name, nn.Sequential(layer, nn.LayerNorm(WIDTH)))
    report = scan(model.eval(), torch.randn(8, WIDTH), policy=policy, advise=True)
    combined = report.combined
    assert len(errors(report)) >= len(names)
    assert combined is not None
    assert combined.outcome == "cure"
    path = tmp_path / "all.yaml"
    path.write_text(combined.text, encoding="utf-8")
    assert scan(model, torch.randn(8, WIDTH), policy=str(path)).verdict == "pass"
    exec(combined.code, {"model": model})
    output = run_in_torch(model, (torch.randn(8, WIDTH),), "half" if policy == "half" else "torch-cpu")
    assert output.isfinite().all()


def test_code_only_where_torch_does_what_the_policy_does() -> None:
    class Top(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x.T

    x = torch.full((8, 64), 100.0)
    for model, policy in ((Top(), "torch-cuda"), (TwoBranches(left=6e4), "paddle-o1")):
        inputs = x if isinstance(model, Top) else torch.randn(8, WIDTH) * 3
        report = scan(model.eval(), inputs, policy=policy, dtype="float16", advise=True)
        assert report.combined is not None, policy
        assert report.combined.outcome == "cure"
        assert report.combined.code == "", policy


@pytest.mark.parametrize("sites", [("right.up", "right.down"), ("right.down", "right.up")])
def test_a_policy_of_ones_own_is_extended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sites: tuple[str, str]
) -> None:
    """By its path as seen from the new file, whose rules do not take the place of inherited ones."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(
        "name: mine\ntitle: mine\nextends: [torch-cuda]\nrules:\n"
        + "".join(
            f"  - {{id: mine/keep-left.up/linear{more}, match: {{site: [{site}/linear]}}, cast: float32, "
            "reason: range, why: it overflows, source: me}\n"
            for site, more in zip(sites, ("", " too"), strict=True)
        )
    )
    model, x = TwoBranches(left=6e4, right=6e4).eval(), torch.randn(8, WIDTH) * 3
    report = scan(model, x, policy="mine.yaml", advise=True)
    assert [f.layer for f in errors(report)] == ["left.up"]
    assert report.combined is not None
    for directory in (tmp_path, tmp_path / "deep" / "er"):
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "all.yaml"
        path.write_text(report.combined.saved_in(directory))
        assert scan(model, x, policy=str(path)).verdict == "pass"


def test_the_file_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    made = run_cli("scan", T5, "--policy", "torch-cuda", "--advise-policy", str(path), columns=60)
    assert made.exit_code == 1
    assert f"policy written to {path}" in made.stderr.replace("\n", "")
    # what is printed can be pasted, however narrow the terminal
    assert path.read_text(encoding="utf-8") in made.stdout
    printed = made.stdout.partition("# as PyTorch code\n")[2].partition("Nearest the limit")[0]
    compile(printed, "printed", "exec")
    assert 'for name in ["blocks.1.wo", "blocks.2.wo"]:' in printed
    after = run_cli("scan", T5, "--policy", str(path))
    assert after.exit_code == 0, after.output
    again = run_cli("scan", T5, "--policy", str(path), "--advise-policy", str(tmp_path / "more.yaml"))
    assert again.exit_code == 0
    assert "there is no error to cure" in again.stderr.replace("\n", " ")
    assert not (tmp_path / "more.yaml").exists()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("all.yaml", ["--policy", "half,torch-cuda"], "one --policy"),
        ("all.yaml", ["--ranges"], "needs a run in 16 bits"),
        ("all.yaml", ["--static"], "needs a run in 16 bits"),
        ("folder", [], "folder is a directory"),
    ],
)
def test_a_policy_file_that_cannot_be(name: str, options: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    made = run_cli("scan", T5, "--advise-policy", str(tmp_path / name), *options)
    assert made.exit_code != 0
    assert said in f"{made.stderr}{made.exception}"


def test_every_format_has_the_policy(tmp_path: Path) -> None:
    _, report, combined = advised(T5, "torch-cuda")
    path = tmp_path / "report.json"
    path.write_text(as_file(report, "json"), encoding="utf-8")
    assert json.loads(path.read_text())["combined"]["text"] == combined.text
    saved = read_report(path)
    assert isinstance(saved, Report)
    assert saved.combined == combined
    assert combined.text in as_file(report, "markdown")
    assert combined.code in as_file(report, "markdown")
    assert json.loads(as_file(report, "sarif"))["runs"][0]["properties"]["combinedPolicy"] == combined.text
    for form in ("github", "junit", "html"):
        made = as_file(report, form)
        assert "One policy for all errors" in made, form
        assert combined.name in made, form
