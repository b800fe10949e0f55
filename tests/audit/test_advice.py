"""Advice that was tried: it cures, it can be pasted, and what does not cure is not printed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ampaudit import convert, scan
from ampaudit.audit.advice.attempts import same_function
from ampaudit.audit.checks import Finding
from ampaudit.audit.inputs import as_source
from ampaudit.core.source_config import SourceConfig
from ampaudit.findings.pages import all_pages
from ampaudit.report.model import Report
from ampaudit.source.open import open_source
from tests.support.models import CASES
from tests.support.models.score import COMBINATIONS
from tests.support.planted import WIDTH, TwoBranches


def errors(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.severity == "error"]


def advised_page(code: str, place: Path) -> Report:
    path = place / "model.py"
    example = all_pages()[code].bad
    path.write_text(example.code, encoding="utf-8")
    source = open_source(str(path), SourceConfig())
    return scan(source, policy=example.options["policy"], dtype="float16", advise=True)


@pytest.mark.parametrize("code", ["AMP108", "AMP113", "AMP203", "AMP204", "AMP301"])
def test_the_rewrite_that_the_page_asks_for_cures_its_bad_example(code: str, tmp_path: Path) -> None:
    (found,) = errors(advised_page(code, tmp_path))
    first = found.tried[0]
    assert (found.code, first.kind) == (code, "rewrite")
    assert "inf or NaN" in first.before
    assert "1 error" in first.before
    assert first.after.endswith("0 errors")


def test_a_larger_eps_cures_a_division_by_zero() -> None:
    class Divided(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (x.abs().sum(-1, keepdim=True) + 1e-8)

    x = torch.randn(4, WIDTH)
    x[0] = 0.0
    (found,) = errors(scan(Divided(), x, policy="half", advise=True))
    assert found.code == "AMP202"
    assert found.tried[0].paste == "eps = 1e-05"


class Pair(nn.Module):
    """A hidden layer whose values are large, between two linear layers."""

    def __init__(self, gain: float = 4e4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.up.weight.mul_(gain)
            self.down.weight.mul_(1 / gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_a_power_of_two_moves_from_one_layer_to_the_next(policy: str) -> None:
    model, x = Pair().eval(), torch.randn(4, WIDTH) * 5
    report = scan(model, x, policy=policy, advise=True)
    (found,) = errors(report)
    cure = found.tried[0]
    assert cure.kind == "rescale"
    assert "0 errors" in cure.after
    before = model(x)
    exec(cure.paste, {"torch": torch, "model": model})
    assert torch.equal(model(x), before)
    assert not errors(scan(model, x, policy=policy))


def test_another_function_is_no_cure() -> None:
    """The guard of the rescaling: FP32 must give the same bits."""
    model, other = Pair().eval(), Pair().eval()
    other.load_state_dict(model.state_dict())
    source = as_source(model, batches=[torch.randn(4, WIDTH)])
    assert same_function(source, other)
    with torch.no_grad():
        other.down.bias[0] += 1e-3
    assert not same_function(source, other)


def test_weights_that_something_else_reads_are_not_rescaled() -> None:
    class Twice(Pair):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.relu(self.up(x))
            return self.down(hidden) + torch.tanh(hidden)

    report = scan(Twice().eval(), torch.randn(4, WIDTH) * 5, policy="half", advise=True)
    assert all(trial.kind != "rescale" for f in errors(report) for trial in f.tried)


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_the_rule_can_be_pasted_and_cures(policy: str, tmp_path: Path) -> None:
    model, x = TwoBranches(left=6e4).eval(), torch.randn(8, WIDTH) * 3
    (found,) = errors(scan(model, x, policy=policy, advise=True))
    rule = next(trial for trial in found.tried if trial.kind == "rule")
    assert "left.up/linear" in rule.change
    path = tmp_path / "mine.yaml"
    indented = rule.paste.replace("\n", "\n  ")
    path.write_text(f"name: mine\ntitle: mine\nextends: [{policy}]\nrules:\n  {indented}\n")
    assert not errors(scan(model, x, policy=str(path)))


def test_what_does_not_cure_is_not_offered() -> None:
    """Beyond bfloat16 as well, and kept in float32 by no rule: the input itself is cast."""

    class Huge(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.half().float() * 1.0

    (found,) = errors(scan(Huge(), torch.full((2, 4), 1e6), policy="torch-cuda", advise=True))
    assert found.tried
    assert found.all_trials_failed
    assert "bfloat16" not in found.advice


def test_advice_does_not_touch_the_model() -> None:
    model = Pair().eval()
    before = [p.clone() for p in model.parameters()]
    scan(model, torch.randn(4, WIDTH) * 5, policy="half", advise=True)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", sorted(CASES))
def test_reported_failures_with_an_error_get_a_cure(name: str) -> None:
    case = CASES[name]
    combination = case.breaks[0]
    policy, dtype = COMBINATIONS[combination]
    torch.manual_seed(11)
    model, inputs = case.build(True)
    report = scan(model.eval(), inputs, policy=policy, dtype=dtype, advise=True)
    found = [f for f in errors(report) if f.origin]
    if not case.wrong:  # where the output is wrong without the overflow, too, one change is not enough
        assert all(f.tried and not f.all_trials_failed for f in found), [(f.code, f.site) for f in found]


def pasted(path: Path, policy: str, *rules: str) -> str:
    path.write_text(f"name: mine\ntitle: mine\nextends: [{policy}]\nrules:\n" + "\n".join(rules) + "\n")
    return str(path)


def test_a_pasted_rule_converts_to_a_program_that_runs(tmp_path: Path) -> None:
    """Under weights of 16 bits: torch's own kernels refuse a graph that mixes dtypes."""
    model, x = TwoBranches(left=6e4).eval(), torch.randn(8, WIDTH) * 3
    (found,) = errors(scan(model, x, policy="half", advise=True))
    rule = next(trial for trial in found.tried if trial.kind == "rule")
    policy = pasted(tmp_path / "mine.yaml", "half", rule.paste)
    _, made = convert(model, x, tmp_path / "out", policy=policy)
    assert made is not None
    program = torch.export.load(tmp_path / "out" / "model.pt2")
    with torch.no_grad():
        wanted, got = model(x).double(), program.module()(x).double()
    accuracy = 10 * torch.log10(wanted.square().sum() / (got - wanted).square().sum())
    assert abs(float(accuracy) - (rule.after_db or 0.0)) < 3


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_two_faults_get_fixes_that_cure_together(policy: str, tmp_path: Path) -> None:
    model, x = TwoBranches(left=6e4, right=6e4).eval(), torch.randn(8, WIDTH) * 3
    found = errors(scan(model, x, policy=policy, advise=True))
    assert {f.layer for f in found} == {"left.up", "right.up"}
    rules = [next(t for t in f.tried if t.kind == "rule") for f in found]
    assert [(t.outcome, t.left, t.after_db) for t in rules] == [("fix", 1, None)] * 2
    assert "outputs broken; 1 error" in rules[0].after
    assert rules[0].in_words.endswith("; fixes this finding, 1 error is left elsewhere")
    # another format cures both
    assert all(f.tried[0].kind == "dtype" and f.tried[0].outcome == "cure" for f in found)
    mine = pasted(tmp_path / "mine.yaml", policy, *(t.paste for t in rules))
    assert not errors(scan(model, x, policy=mine))


def test_a_hidden_error_is_no_error_that_is_left() -> None:
    model, x = TwoBranches(left=6e4, right=6e4).eval(), torch.randn(8, WIDTH) * 3
    report = scan(model, x, policy="torch-cuda", advise=True, ignore=["AMP101:right*"])
    (found,) = (f for f in errors(report) if f.suppressed is None)
    assert found.layer == "left.up"
    assert all(t.outcome == "cure" for t in found.tried if t.kind == "dtype")


def test_advice_in_training_mode_draws_the_same_numbers() -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(torch.softmax(self.drop(self.inner(x)) * 40, -1))

    (found,) = errors(scan(Dropped().train(), torch.randn(8, WIDTH), policy="half", advise=True))
    assert found.tried[0].kind == "rewrite"
    assert (found.tried[0].after_db or 0.0) > 40


def test_a_model_that_cannot_be_called_in_fp32_gets_no_rewrite() -> None:
    """There is nothing to judge a rewrite by; a rule keeps the graph, whose reference is the model."""

    class Half(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.dtype is torch.float32:
                raise RuntimeError("only in 16 bits")
            return torch.log(torch.softmax(x * 40, -1))

    (found,) = errors(scan(Half(), torch.randn(4, WIDTH), policy="half", advise=True))[:1]
    assert all(trial.kind != "rewrite" for trial in found.tried)
