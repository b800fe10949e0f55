"""``scan --backward --sensitivity``: the rows add up to the error that the gradients have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ampaudit
from ampaudit.core.errors import CouldNotAudit

TARGET = torch.arange(16) * 61


def loss(output: torch.Tensor, *_: Any) -> torch.Tensor:
    return F.cross_entropy(output, TARGET % output.shape[-1])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Smooth(nn.Module):
    """Attention by scaled_dot_product_attention, tied weights, a residual, dropout, a detached value."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 32)
        self.inner, self.outer, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        q, k, v = self.inner(self.norm(x)).chunk(3, -1)
        x = x + F.dropout(self.outer(F.scaled_dot_product_attention(q, k, v)), 0.1, self.training)
        x = F.gelu(x - x.detach().mean())
        return x.mean(1) @ self.table.weight.T


class Jumps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.max_pool2d(F.relu(self.norm(self.conv(x))), 2).flatten(1))


def scanned(model: nn.Module, x: torch.Tensor, policy: str, dtype: str, **more: Any) -> ampaudit.Report:
    report = ampaudit.scan(
        model, x, policy=policy, dtype=dtype, backward=True, loss=loss, sensitivity=True, **more
    )
    assert isinstance(report, ampaudit.Report)
    return report


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("policy", ["torch-cuda", "16-bit"])
@pytest.mark.parametrize("kind", [Recurrent, Smooth])
def test_the_rows_add_up_to_the_measured_error(kind: type[nn.Module], policy: str, dtype: str) -> None:
    torch.manual_seed(1)
    x = torch.randint(0, 1000, (16, 9)) if kind is Smooth else torch.randn(16, 9, 16)
    found = scanned(kind(), x, policy, dtype).sections["sensitivity"]
    assert found is not None
    assert found.of == "gradients"
    assert found.predicted_db is not None
    assert found.predicted_db == pytest.approx(found.measured_db, abs=1.5)
    assert sum(row.share for row in found.rows) == pytest.approx(1.0, abs=1e-3)
    assert {"gradient", "op"} <= {row.kind for row in found.rows}
    assert "jump" not in {row.kind for row in found.rows}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_values_carried_over_the_edge_of_a_derivative_are_the_error(dtype: str) -> None:
    torch.manual_seed(2)
    found = scanned(Jumps(), torch.randn(16, 3, 16, 16), "torch-cuda", dtype).sections["sensitivity"]
    assert found is not None
    worst = found.rows[0]
    assert (worst.kind, worst.op) in {("jump", "aten.relu.default"), ("jump", "aten.max_pool2d.default")}
    assert sum(row.share for row in found.rows if row.kind == "jump") > 0.5
    assert found.predicted_db == pytest.approx(found.measured_db, abs=2.0)


ONE_OP = """
name: one
title: multiplications in 16 bits
loss_scale: none
defaults: {cast: float32, why: "the test's"}
rules:
- {id: one/mul, match: {op: [mul.Tensor]}, cast: lower, reason: semantics, why: "test", source: test}
"""


class OneRounding(nn.Module):
    """In float16, under a policy for `mul` alone, one value and two gradients are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, dtype=torch.float64).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x * self.weight) ** 2).sum(-1)


def test_one_op_in_16_bits_costs_what_differentiating_by_hand_says(tmp_path: Path) -> None:
    """The error of dL/dw in closed form, from the roundings of y = xw, x, w, and of the gradients."""
    torch.manual_seed(3)
    model, x = OneRounding(), torch.randn(256, 64)
    rules = tmp_path / "one.yaml"
    rules.write_text(ONE_OP)
    report = ampaudit.scan(
        model,
        x,
        policy=rules,
        backward=True,
        loss=lambda out, *_: out.mean(),
        sensitivity=True,
        loss_scale=1024.0,
    )
    found = report.sections["sensitivity"]
    assert found is not None
    w, wide = model.weight.detach().double(), x.double()

    def low(value: torch.Tensor) -> torch.Tensor:
        return value.half().double()

    def outer(y: torch.Tensor) -> torch.Tensor:  # 1024 dL/dy
        return 2 * torch.tanh(y) * (1 - torch.tanh(y) ** 2) / 256 * 1024

    exact = (outer(wide * w) * wide).sum(0)
    got = low((low(outer(low(low(wide) * low(w)))) * low(wide)).sum(0))
    by_hand = 10 * torch.log10(exact.square().sum() / (got - exact).square().sum())
    assert found.measured_db == pytest.approx(float(by_hand), abs=1.0)
    assert found.predicted_db == pytest.approx(float(by_hand), abs=1.0)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Straight.apply(self.first(x)))


def test_a_custom_backward_is_refused_by_name() -> None:
    with pytest.raises(CouldNotAudit, match="Straight"):
        scanned(Custom(), torch.randn(16, 8), "torch-cuda", "float16")


def test_asking_for_it_changes_no_gradient() -> None:
    torch.manual_seed(4)
    model, x = Recurrent(), torch.randn(16, 9, 16)
    ranked = scanned(model, x, "torch-cuda", "float16")
    plain = ampaudit.scan(model, x, policy="torch-cuda", backward=True, loss=loss)
    assert plain.sections == {}
    assert plain.backward == ranked.backward
    assert [site.gradient for site in plain.sites] == [site.gradient for site in ranked.sites]
