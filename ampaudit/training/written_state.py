"""Watches the buffers that forward passes write, such as the statistics of batch norm."""

from __future__ import annotations

import torch
from torch import nn

from ampaudit.trace.entry import layer_path

__all__ = ["WrittenState"]


class WrittenState:
    """The floating-point buffers of a model that were finite when it was first seen.

    A step that the loss scaler skips leaves the parameters alone, but not what its forward pass has written.
    """

    def __init__(self, model: nn.Module) -> None:
        buffers = [
            (layer_path(name), b) for name, b in model.named_buffers() if b.is_floating_point() and b.numel()
        ]
        finite = _finite([buffer for _, buffer in buffers])
        self._buffers = {
            name: buffer for (name, buffer), holds in zip(buffers, finite.tolist(), strict=True) if holds
        }
        self._seen: list[tuple[int, torch.Tensor]] = []

    def measure(self, step: int) -> None:
        """Note which buffers are finite after a step, on their device."""
        if self._buffers:
            self._seen.append((step, _finite(list(self._buffers.values()))))

    def broken(self) -> tuple[tuple[str, int | None], ...]:
        """Return the buffers that are inf or NaN now, with the first measured step after which they were."""
        buffers = []
        now = _finite(list(self._buffers.values())).tolist()
        table = [(step, finite.tolist()) for step, finite in self._seen]
        for index, name in enumerate(self._buffers):
            if not now[index]:
                since = None
                for step, finite in reversed(table):
                    if finite[index]:
                        break
                    since = step
                buffers.append((name, since))
        return tuple(buffers)


@torch.no_grad()
def _finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return for each tensor whether all its elements are finite: their product with zero is zero."""
    if not tensors:
        return torch.ones(0, dtype=torch.bool)
    device = tensors[0].device
    return torch.stack([(t * 0).sum().to(device, torch.float32) == 0 for t in tensors])
