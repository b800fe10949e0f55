"""Runs the user's own FP32 model eagerly, since a trace may have followed another code path."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.core.errors import RunFailed
from ampaudit.run.guards import guarded
from ampaudit.source.interface import Batch
from ampaudit.trace.capture import quiet
from ampaudit.trace.converted import Release
from ampaudit.trace.entry import flatten_outputs
from ampaudit.trace.fake_model import named_tensors, without_cache
from ampaudit.trace.isolation import seeded
from ampaudit.trace.structure import structural_copy
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["EagerModel"]


class EagerModel:
    """Calls a model in FP32 on a device, widening 16-bit weights and inputs without changing the model.

    Each call is one of a new copy, which shares the weights; policies that run side by side share the call.

    Args:
        device: where to run.
        seed: of the random numbers, plus the number of the batch.
        release: gives the memory of a weight back, where weights are left on disk.
    """

    def __init__(self, device: torch.device, seed: int, release: Release | None) -> None:
        self._device = device
        self._seed = seed
        self._release = release
        self._last: tuple[int, dict[str, torch.Tensor]] | None = None

    @torch.no_grad()
    def outputs(self, model: nn.Module, batch: Batch, number: int) -> dict[str, torch.Tensor]:
        """Return the model's outputs for a batch, by the names that a trace uses."""
        if self._last is None or self._last[0] != number:
            self._last = None
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._own, (batch.args, batch.kwargs))
            copied = self._copy(model)
            with quiet(), guarded(self._device, batch), seeded(self._seed + number):
                found = flatten_outputs(copied(*args, **kwargs))
            self._last = number, dict(found)
            if self._release is not None:
                for tensor in named_tensors(model).values():
                    self._release(tensor)
        return self._last[1]

    def _copy(self, model: nn.Module) -> nn.Module:
        tensors: dict[int, torch.Tensor] = {}
        for tensor in named_tensors(model).values():
            if self._release is not None and tensor.dtype in LOW_PRECISION_DTYPES:
                raise RunFailed("streamed 16-bit weights cannot be held in FP32")
            if isinstance(tensor, nn.Parameter):
                tensors[id(tensor)] = nn.Parameter(self._wide(tensor), False)
            else:
                tensors[id(tensor)] = self._own(tensor)
        for module in model.modules():
            for value in vars(module).values():
                if isinstance(value, torch.Tensor):
                    tensors.setdefault(id(value), self._own(value))
        made = structural_copy(model, tensors)
        without_cache(made)
        return made

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the device, widened from 16 bits; without a copy if possible."""
        found = tensor.detach().to(self._device)
        return found.float() if found.dtype in LOW_PRECISION_DTYPES else found

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Like ``_wide``, but in memory that the model may write to."""
        found = self._wide(tensor)
        return found.clone() if found.data_ptr() == tensor.data_ptr() else found
