"""Several policies in one run: the same reports as one by one, and a reference that is computed once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from ampaudit import scan
from ampaudit.audit.config import ScanConfig
from ampaudit.audit.scan import scan_policies
from ampaudit.cli.program import main
from ampaudit.core.errors import TraceFailed
from ampaudit.report.model import Report
from ampaudit.run import lockstep
from ampaudit.run.backends import Float32Backend
from ampaudit.run.lockstep import SharedReference
from ampaudit.source import Batch, ModelSource
from tests.support.zoo import ZOO

POLICIES = ["torch-cuda", "half", "ampaudit", "onnx", "tensorflow", "modelopt"]


def without_time(report: Report) -> Report:
    return dataclasses.replace(report, timings={})


def source_of(model: nn.Module, *batches: Batch) -> ModelSource:
    return ModelSource(type(model).__name__, "object", model, batches)


@pytest.mark.parametrize("name", ["bert", "resnet", "gpt2", "t5"])
def test_side_by_side_equals_one_by_one(name: str) -> None:
    zoo = ZOO[name]()
    source = source_of(zoo.model.eval(), Batch((), zoo.kwargs))
    together = scan_policies(source, POLICIES, ScanConfig())
    for policy, report in zip(POLICIES, together, strict=True):
        (alone,) = scan_policies(source, [policy], ScanConfig())
        assert without_time(report) == without_time(alone), policy


def test_training_with_dropout_falls_back_to_one_after_the_other() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).train()
    source = source_of(model, Batch((torch.randn(4, 8),)))
    together = scan_policies(source, ["torch-cuda", "half"], ScanConfig())
    for policy, report in zip(["torch-cuda", "half"], together, strict=True):
        (alone,) = scan_policies(source, [policy], ScanConfig())
        assert without_time(report) == without_time(alone)


class Attends(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


class WritesInHalf(nn.Module):
    """Writes in place under one policy only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        g = torch.tanh(h)
        if x.dtype == torch.float16:
            h.add_(1.0)
        return self.second(h) + g


@pytest.mark.parametrize("policies", [["torch-cuda", "half"], ["half", "torch-cuda"]])
@pytest.mark.parametrize("kind", [Attends, WritesInHalf])
def test_chance_and_writes_of_one_policy_do_not_reach_the_other(
    kind: type[nn.Module], policies: list[str]
) -> None:
    source = source_of(kind().train(), Batch((torch.randn(2, 4, 8),)))
    together = scan_policies(source, policies, ScanConfig())
    for policy, report in zip(policies, together, strict=True):
        (alone,) = scan_policies(source, [policy], ScanConfig())
        assert without_time(report) == without_time(alone)


class Grows(nn.Module):
    """Overflows under every policy that lowers, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(6))
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.mul_(40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(x)
            h += x
            x = torch.relu_(h)
            if x.dtype == torch.float16:
                x = x.clamp(-60000, 60000)
        return x


def test_broken_models_with_dtype_branches_and_writes_compare_the_same() -> None:
    torch.manual_seed(0)
    source = source_of(Grows().eval(), Batch((torch.randn(4, 16),)), Batch((torch.randn(4, 16) * 3,)))
    together = scan_policies(source, POLICIES, ScanConfig())
    assert any(report.findings for report in together)
    for policy, report in zip(POLICIES, together, strict=True):
        (alone,) = scan_policies(source, [policy], ScanConfig())
        assert without_time(report) == without_time(alone), policy


def test_the_reference_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    zoo = ZOO["bert"]()
    source = source_of(zoo.model.eval(), Batch((), zoo.kwargs))
    made: list[SharedReference] = []

    def spy(programs: list[object]) -> SharedReference:
        made.append(SharedReference(programs))  # type: ignore[arg-type]
        return made[-1]

    calls = 0
    original = Float32Backend.call

    def count(self: Float32Backend, *args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += type(self) is Float32Backend
        return original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(lockstep, "SharedReference", spy)
    monkeypatch.setattr(Float32Backend, "call", count)
    scan_policies(source, ["torch-cuda"], ScanConfig())
    alone, calls = calls, 0
    scan_policies(source, ["torch-cuda", "apex-o1", "paddle-o1"], ScanConfig())
    (shared,) = made
    computing = sum(step.makes_values for step in shared.programs[0].steps)
    assert shared.reused > 2 * 0.6 * computing
    assert calls < 2.2 * alone  # what is computed again are casts, which do nothing in float32
    assert not shared._results


def test_the_command(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\nfrom torch import nn\n"
        "class Big(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.first = nn.Linear(8, 8)\n"
        "        nn.init.constant_(self.first.weight, 3e4)\n"
        "    def forward(self, x):\n        return self.first(x)\n"
        "def example_inputs():\n    return torch.ones(2, 8)\n"
    )
    result = CliRunner().invoke(main, ["scan", str(model), "--policy", "torch-cuda, ampaudit"])
    assert result.exit_code == 1, result.output
    assert CliRunner().invoke(main, ["scan", str(model), "--policy", "ampaudit,as-is"]).exit_code == 0
    assert "against one FP32 run" in result.stdout
    assert "torch-cuda  breaks at first linear" in result.stdout
    both_fail = CliRunner().invoke(main, ["scan", str(model), "--policy", "torch-cuda,half"])
    assert both_fail.exit_code == 1
    as_json = CliRunner().invoke(
        main, ["scan", str(model), "--policy", "torch-cuda,half", "--format", "json"]
    )
    data = json.loads(as_json.stdout)
    assert [report["run"]["policy"] for report in data["reports"]] == ["torch-cuda", "half"]
    assert data["reports"][0]["verdict"] == "fail"


def test_a_policy_that_cannot_be_audited_hides_no_other(tmp_path: Path) -> None:
    """A real half model is given half inputs, and refuses them; under autocast they stay float32."""
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\nfrom torch import nn\n"
        "class Strict(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.first = nn.Linear(8, 8)\n"
        "    def forward(self, x):\n        assert x.dtype == torch.float32\n        return self.first(x)\n"
        "def example_inputs():\n    return torch.ones(2, 8)\n"
    )
    for policies in ("half,torch-cuda,ampaudit", "torch-cuda,half,ampaudit"):
        found = CliRunner().invoke(main, ["scan", str(model), "--policy", policies, "--format", "json"])
        assert found.exit_code == 3
        data = json.loads(found.stdout)
        assert [report["run"]["policy"] for report in data["reports"]] == ["torch-cuda", "ampaudit"]
        assert any(line.startswith("ampaudit: policy half: ") for line in found.stderr.splitlines())
        assert "Traceback" not in found.output
    with pytest.raises(TraceFailed):
        CliRunner().invoke(main, ["scan", str(model), "--policy", "half,half"], catch_exceptions=False)


def test_what_a_measured_policy_raises_is_told_and_is_enough() -> None:
    class Down(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(8, 8, bias=False)
            self.next = nn.Linear(8, 8, bias=False)
            nn.init.constant_(self.down.weight, 2e4)
            nn.init.constant_(self.next.weight, 1e-6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.next(x + self.down(x))

    x = torch.ones(2, 8)
    broken = scan(Down().eval(), x, policy="torch-cuda")
    healed = scan(Down().eval(), x)
    assert {f.site for f in broken.findings if f.code == "AMP101"} == {"down/linear", "next/cast"}
    assert not healed.findings
    assert set(healed.promoted) == {"down/linear", "next/linear"}
    assert healed.run.policy == "ampaudit"
    healthy = scan(Down().eval(), x * 1e-3)
    assert healthy.promoted == ()
    assert "first pass" not in healthy.timings
