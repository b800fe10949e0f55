"""Samples every value of an FP32 run, to compare values between two graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ampaudit.run.lockstep import LockStep
from ampaudit.run.observer import Observer, StepCall
from ampaudit.run.step import Step

__all__ = ["Values", "agreement", "plain_value", "samples_of"]

_KEPT = 2048  # elements of each value


class Values(Observer):
    """Samples elements of every tensor of a run, at positions that do not depend on its shape.

    Attributes:
        kept: Number of elements and a sample of them, by node.
    """

    __slots__ = ("kept",)

    def __init__(self, executor: LockStep, inputs: list[torch.Tensor]) -> None:
        self.kept: dict[fx.Node, tuple[int, torch.Tensor]] = {}
        remaining = iter(inputs)
        for node in executor.program.inputs:
            master = executor.converted.masters.get(node.name)
            self._keep(node, next(remaining) if master is None else master.detach())

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Keep elements of FP32's value."""
        self._keep(step.node, reference)
        return value

    def _keep(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor) and not value.is_complex():
            self.kept[node] = value.numel(), samples_of(value)


def samples_of(value: torch.Tensor) -> torch.Tensor:
    """Return elements at positions that depend only on their number, in float64 on the CPU."""
    count = value.numel()
    if count <= _KEPT:
        return value.detach().reshape(-1).to("cpu", torch.float64)
    places = torch.arange(_KEPT, dtype=torch.int64) * (count - 1) // (_KEPT - 1)
    if value.is_contiguous():
        return value.detach().reshape(-1)[places.to(value.device)].to("cpu", torch.float64)
    index = torch.unravel_index(places.to(value.device), value.shape)
    return value.detach()[index].to("cpu", torch.float64)


def agreement(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the mean relative error of two samples, at most 1.

    Errors of relatively small elements are measured against the median, so that neither masks nor the
    remainders of sums that cancel dominate. Infinities must agree.
    """
    if first.shape != second.shape:
        return 1.0
    if torch.equal(first, second):
        return 0.0
    size = first.abs().nan_to_num(0.0, 0.0, 0.0)
    usual = float(size.median()) or float(size.mean()) or 1.0
    apart = (first - second).abs() / (size + usual)
    same = (first == second) | (first.isnan() & second.isnan())
    return float(torch.where(same, 0.0, apart.nan_to_num(1.0, 1.0, 1.0)).clamp(max=1.0).mean())


def plain_value(value: Any) -> Any:
    """Return a number, a text, or a list of these; ``None`` for anything else."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(v, bool | int | float | str) for v in value):
        return list(value)
    return None
