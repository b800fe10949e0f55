"""Collects what the model's code reads during one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ampaudit.core.sites import SiteId
from ampaudit.run.observer import StepCall
from ampaudit.run.step import Step
from ampaudit.trace.marks import VALUE_READ, mark_number

__all__ = ["PathValues"]


class PathValues:
    """Collects what the model's code reads during one run; values stay on their device until the end.

    Attributes:
        resized: sites whose result has another size in 16 bits, with that size.
    """

    def __init__(self) -> None:
        self._read: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.resized: list[tuple[SiteId, str]] = []

    def observe(self, step: Step, reference: Any, call: StepCall) -> None:
        """Keep the values of a read, and the sizes that choices decide."""
        if call.resized is not None and step.site is not None:
            self.resized.append((step.site.id, call.resized))
        if step.target is VALUE_READ:
            ((reference, value),) = call.inputs.values()
            copied = reference.detach().clone()
            low = copied if value is reference else value.detach().clone()
            self._read.append((mark_number(step.node), copied, low))

    def state(self) -> dict[str, Any]:
        """Return what was read, as plain data and tensors."""
        return {"read": self._read, "resized": self.resized}

    def restore(self, state: dict[str, Any]) -> None:
        """Take what another process has read."""
        self._read, self.resized = state["read"], state["resized"]

    def results(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return both values of each read, fetched from their device together."""
        numbers = [number for number, _, _ in self._read]
        fp32 = _fetched([reference for _, reference, _ in self._read])
        low = _fetched([value for _, _, value in self._read])
        return dict(zip(numbers, zip(fp32, low, strict=True), strict=True))


def _fetched(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the CPU, those of one dtype at once."""
    found: dict[int, torch.Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:
        group = [(i, tensor) for i, tensor in enumerate(tensors) if tensor.dtype is dtype]
        flat = torch.cat([tensor.reshape(-1) for _, tensor in group]).cpu()
        parts = flat.split([tensor.numel() for _, tensor in group])
        found |= {i: part.reshape(tensor.shape) for (i, tensor), part in zip(group, parts, strict=True)}
    return [found[i] for i in range(len(tensors))]
