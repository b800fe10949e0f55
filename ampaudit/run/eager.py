"""Runs the user's own FP32 model as plain Python, where a trace may show other code than FP32 runs."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.run.guards import guarded
from ampaudit.run.step import LOWER
from ampaudit.source.interface import Batch
from ampaudit.trace.capture import quiet
from ampaudit.trace.entry import flatten_outputs
from ampaudit.trace.graph import TracedModel
from ampaudit.trace.python_random import PythonRandom
from ampaudit.trace.shadow import named_tensors, without_cache
from ampaudit.trace.structure import structural_copy

__all__ = ["EagerModel"]

Outputs = dict[str, torch.Tensor]


class EagerModel:
    """The user's model in FP32 on a device: 16-bit weights and inputs are widened, nothing of it is changed.

    Each run is one of a new copy, which shares the weights: what a run leaves in buffers and attributes is
    not seen by the next, as in the runs of a graph.

    Args:
        model: the user's model.
        device: where to run.
        seed: of torch's random numbers, plus the number of the batch.
    """

    def __init__(self, model: nn.Module, device: torch.device, seed: int) -> None:
        self._model = model
        self._device = device
        self._seed = seed
        self._last: tuple[tuple[int, int], Outputs] | None = None
        self._drawn: dict[int, PythonRandom] = {}

    def outputs(self, batch: Batch, number: int, traced: TracedModel) -> Outputs:
        """What the model returns for a batch, by the names that a trace gives; policies share one run.

        A trace that drew random numbers of Python's has those of the moment when it was made: the first run
        draws the same ones, the next ones follow.
        """
        drew = traced.drew
        key = number, id(drew)
        if self._last is None or self._last[0] != key:
            self._last = None
            start = PythonRandom() if drew is None else self._drawn.get(id(drew), drew)
            with start.within():
                found = self._run(batch, number)
                self._drawn[id(drew)] = PythonRandom()
            self._last = key, found
        return self._last[1]

    @torch.no_grad()
    def _run(self, batch: Batch, number: int) -> Outputs:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._own, (batch.args, batch.kwargs))
        model = self._copy()
        with quiet(), guarded(self._device):
            torch.manual_seed(self._seed + number)
            return dict(flatten_outputs(model(*args, **kwargs)))

    def _copy(self) -> nn.Module:
        tensors: dict[int, torch.Tensor] = {}
        for tensor in named_tensors(self._model).values():
            if isinstance(tensor, nn.Parameter):
                tensors[id(tensor)] = nn.Parameter(self._wide(tensor), False)
            else:
                tensors[id(tensor)] = self._own(tensor)
        for module in self._model.modules():
            for value in vars(module).values():
                if isinstance(value, torch.Tensor):
                    tensors.setdefault(id(value), self._own(value))
        made = structural_copy(self._model, tensors)
        without_cache(made)
        return made

    def _wide(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device, widened from 16 bits; no copy where it is so already."""
        found = tensor.detach().to(self._device)
        return found.float() if found.dtype in LOWER else found

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """As ``_wide``, in memory that the model may write to."""
        found = self._wide(tensor)
        return found.clone() if found.data_ptr() == tensor.data_ptr() else found
