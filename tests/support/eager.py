"""Audits compared with the eager FP32 model and a real ``.half()`` model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import ampaudit
from tests.support.wrap import Wrap

Outputs = dict[str, tuple[Any, Any]]


def whole_numbers() -> nn.Linear:
    """A layer whose results no format rounds."""
    layer = nn.Linear(8, 8)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 5 - 2.0)
    return layer


def numbers(*shape: int) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()).view(shape) * 7 % 11 - 5).float()


def model_of(function: Callable[..., Any]) -> nn.Module:
    return Wrap(function, a=whole_numbers()).eval()


def audited(model: nn.Module, *inputs: torch.Tensor, **options: Any) -> tuple[ampaudit.Report, Outputs]:
    kept: Outputs = {}
    report = ampaudit.scan(
        model,
        inputs,
        policy="half",
        session=ampaudit.Session(keep_outputs=lambda _, found: kept.update(found)),
        **options,
    )
    return report, kept


def agrees_with_eager(model: nn.Module, *inputs: torch.Tensor) -> ampaudit.Report:
    """Both runs of an audit against the model itself and a real half model; both call it once."""
    half = copy.deepcopy(model).half()
    lowered = pytree.tree_map_only(torch.Tensor, lambda t: t.half() if t.is_floating_point() else t, inputs)
    report, kept = audited(model, *inputs)
    with torch.no_grad():
        expected = [x for x in pytree.tree_leaves(model(*inputs)) if isinstance(x, torch.Tensor)]
        in_half = [x for x in pytree.tree_leaves(half(*lowered)) if isinstance(x, torch.Tensor)]
    assert len(kept) == len(expected)
    for (reference, value), whole, low in zip(kept.values(), expected, in_half, strict=True):
        assert torch.equal(reference, whole)
        assert value.shape == low.shape
        torch.testing.assert_close(value.to(low.dtype), low, rtol=2e-3, atol=1e-3)
    return report


EVERY_WAY: list[dict[str, Any]] = [
    {"policy": "torch-cuda"},
    {"policy": "ampaudit", "prove": True},
    {"policy": "torch-tensorrt", "advise": True},
    {"policy": "half", "static": True},
    {"policy": "half", "contract": "decomposed,lower-accumulate"},
    {"policy": "half", "backward": True, "loss": lambda y: pytree.tree_leaves(y)[0].float().mean()},
]
