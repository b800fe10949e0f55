"""Over several steps, each takes the path that FP32's state decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ampaudit import scan
from ampaudit.core.session import Session


class Counts(nn.Module):
    """Scales its output from the sixth call on."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        nn.init.eye_(self.a.weight)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls.item() > 5:
            return self.a(x) * 1e5
        return self.a(x)


class Halves(nn.Module):
    """Decides on its state, which float16 rounds to the other side."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        nn.init.eye_(self.a.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0].item() < 0.3001:
            return self.a(x) * 2
        return self.a(x) / 2


def again(outputs: torch.Tensor, inputs: Any) -> tuple[torch.Tensor]:
    del inputs
    return (outputs,)


@pytest.mark.parametrize("policy", ["half", "onnx"])
def test_a_buffer_of_earlier_steps_decides_the_path(policy: str) -> None:
    report = scan(
        Counts().eval(), torch.ones(2, 8), policy=policy, steps=8, next_inputs=lambda outputs, inputs: inputs
    )
    assert report.path is not None
    assert report.path.count == 2
    assert report.steps is not None
    if policy == "half":  # onnx clips the constant
        assert [step.step for step in report.steps.steps if step.origins] == [6, 7, 8]


def test_the_state_of_fp32_decides_the_path() -> None:
    kept: dict[int, torch.Tensor] = {}
    report = scan(
        Halves().eval(),
        torch.full((2, 8), 0.60032),
        policy="half",
        steps=2,
        next_inputs=again,
        session=Session(
            keep_outputs=lambda number, found: kept.__setitem__(number, next(iter(found.values()))[0])
        ),
    )
    assert torch.allclose(kept[1], torch.full((2, 8), 0.15008), atol=1e-4)
    assert [finding.code for finding in report.findings if finding.code == "AMP214"] == ["AMP214"]
