"""Cells split their gates by views that autograd does not track, and write to them in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import ampaudit
from tests.support.wrap import Wrap


def split_gates(m: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = torch.unsafe_chunk(m.a(x), 2, -1)
    return first.sigmoid_() * second.tanh_()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm cell": lambda: nn.LSTMCell(8, 8),
    "gru cell": lambda: Wrap(lambda m, x: m.a(x, m.a(x)), a=nn.GRUCell(8, 8)),
    "lstm": lambda: nn.LSTM(8, 8, 2),
    "gru": lambda: nn.GRU(8, 8),
    "gates": lambda: Wrap(split_gates, a=nn.Linear(8, 8)),
}


@pytest.mark.parametrize("policy", ["torch-cpu", "torch-cuda", "half"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_cells_are_those_of_autograd(name: str, policy: str) -> None:
    def loss(output: Any) -> torch.Tensor:
        return torch.stack([value.float().square().mean() for value in pytree.tree_leaves(output)]).sum()

    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(4, 8)
    report = ampaudit.scan(
        model, x, policy=policy, dtype="bfloat16", backward=True, loss=loss, loss_scale=1.0
    )
    assert report.backward is not None
    found = {row.name: row.gradient for row in report.backward.parameters}
    loss(model(x)).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert found[key].peak == pytest.approx(float(parameter.grad.abs().max()), rel=1e-4)
        assert found[key].sqnr_db is None or found[key].sqnr_db > 25
