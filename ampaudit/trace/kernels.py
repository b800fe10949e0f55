"""Asks the kernels of ops from outside PyTorch whether they take 16-bit tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from ampaudit.trace.internals import without_autocast, without_modes
from ampaudit.trace.isolation import seeded
from ampaudit.trace.op_calls import OpCalled
from ampaudit.trace.opnames import example_size, is_foreign
from ampaudit.trace.values import LOW_PRECISION_DTYPES, WIDE

__all__ = ["KernelTrials", "takes_low_precision"]


def takes_low_precision(called: OpCalled) -> bool:
    """Return whether an argument of a call is a 16-bit tensor."""
    leaves = pytree.tree_leaves((called.args, called.kwargs))
    return any(isinstance(leaf, torch.Tensor) and leaf.dtype in LOW_PRECISION_DTYPES for leaf in leaves)


class KernelTrials:
    """Calls kernels on zeros, since a function that describes their results says nothing about dtypes."""

    def __init__(self) -> None:
        self._refused: dict[tuple[Any, ...], bool] = {}

    def refuses(self, called: OpCalled) -> bool:
        """Return whether an op raises for 16-bit tensors of these sizes, and not for the same in FP32.

        Ops that talk to other processes are not tried.
        """
        if not is_foreign(called.op) or not takes_low_precision(called) or "c10d" in called.op.namespace:
            return False
        key = (called.op, repr(pytree.tree_map_only(torch.Tensor, _signature, (called.args, called.kwargs))))
        if key not in self._refused:
            with without_modes(), torch.no_grad(), without_autocast(), seeded(0):
                self._refused[key] = not _runs(called, wide=False) and _runs(called, wide=True)
        return self._refused[key]


def _signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(map(example_size, tensor.shape)), tensor.dtype, tensor.device


def _runs(called: OpCalled, *, wide: bool) -> bool:
    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        sizes, strides = ([example_size(size) for size in found] for found in (tensor.shape, tensor.stride()))
        dtype = WIDE.get(tensor.dtype, tensor.dtype) if wide else tensor.dtype
        return torch.empty_strided(sizes, strides, dtype=dtype, device=tensor.device).zero_()

    try:
        args, kwargs = pytree.tree_map_only(torch.Tensor, zeros, (called.args, called.kwargs))
        args, kwargs = pytree.tree_map_only(torch.SymInt, example_size, (args, kwargs))
        called.op(*args, **kwargs)
    except Exception:  # whatever a kernel raises
        return False
    return True
