"""The PyTorch code that a tuning prints, run as a user runs it: real half-precision modules."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.render.render import as_file
from ampaudit.report.tuning import TuningReport
from tests.support.saved import sample


class Block(nn.Module):
    """A residual block whose inner values are larger by a factor."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(nn.functional.gelu(self.up(self.norm(x) * self.scale)))
        return x + made / self.scale


def stacked(*scales: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *map(Block, scales), nn.Linear(16, 4)).eval()


def accuracy(model: nn.Module, code: str, x: torch.Tensor, dtype: torch.dtype) -> float:
    """Decibels of a model that the code has changed, as PyTorch runs it."""
    space: dict[str, Any] = {"model": copy.deepcopy(model)}
    exec(code, space)
    with torch.no_grad():
        exact, made = model(x), space["model"](x.to(dtype)).float()
    return 10 * math.log10(float(exact.square().sum() / (exact - made).square().sum()))


@pytest.mark.parametrize(
    ("scales", "dtype", "target"),
    [
        ((1.0, 1.0), "float16", 50.0),
        ((1.0, 1.0), "bfloat16", 30.0),
        ((1.0, 5e4, 1.0), "float16", 50.0),
        ((5e4, 5e4), "float16", 40.0),
    ],
)
def test_the_code_does_what_the_policy_does(scales: tuple[float, ...], dtype: str, target: float) -> None:
    model, x = stacked(*scales), torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    report = ampaudit.tune(model, x, min_sqnr=target, dtype=dtype)
    assert report.reached
    then = f"\n# it takes floating-point inputs in {dtype}"
    assert report.code.endswith(then)
    if not report.kept:
        assert report.code == f"model.{'half' if dtype == 'float16' else 'bfloat16'}(){then}"
    assert accuracy(model, report.code, x, getattr(torch, dtype)) > target - 3  # kernels add in another order


def test_what_no_layer_has_gives_no_code() -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = stacked(1.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.inner(x) * 1e6 / 1e6
            return made

    report = ampaudit.tune(Outside().eval(), torch.ones(4, 8), min_sqnr=40)
    assert report.reached
    assert any(kept.layer == "" for kept in report.kept)
    assert report.code == ""


@pytest.mark.parametrize("form", ["html", "markdown", "json"])
def test_each_format_has_the_code(form: str) -> None:
    report = sample("tuning")
    assert isinstance(report, TuningReport)
    assert "cast_inputs" not in as_file(report, form)
    assert "cast_inputs(model)" in as_file(replace(report, code="import torch\ncast_inputs(model)\n"), form)
