"""Resizes batches by repeating or dropping samples, and moves them to a device."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils import _pytree as pytree

from ampaudit.core.errors import InputError
from ampaudit.source import Batch

__all__ = ["batch_size_of", "moved", "resized"]


def batch_size_of(batch: Batch) -> int:
    """Return the first dimension shared by most tensors of a batch; 1 if there is none."""
    leaves = pytree.tree_leaves((batch.args, batch.kwargs))
    counts = Counter(t.shape[0] for t in leaves if isinstance(t, torch.Tensor) and t.ndim > 0)
    return counts.most_common(1)[0][0] if counts else 1


def resized(batch: Batch, size: int) -> Batch:
    """Resize a batch to ``size`` samples: repeat or cut every tensor whose first dimension is the batch's.

    Raises:
        InputError: no tensor has a first dimension, so that there is nothing to repeat.
    """
    own = batch_size_of(batch)
    if own == size:
        return batch
    if not any(t.ndim > 0 and t.shape[0] == own for t in _tensors(batch)):
        raise InputError("the batch has no dimension of samples", hint="leave out --batch-size")

    def change(value: torch.Tensor) -> torch.Tensor:
        if value.ndim == 0 or value.shape[0] != own:
            return value
        return value[torch.arange(size) % own].contiguous()

    return batch.mapped(change)


def moved(batch: Batch, device: torch.device, dtype: torch.dtype | None = None) -> Batch:
    """Move a batch to a device, and floating-point tensors to another dtype if one is given."""

    def move(value: torch.Tensor) -> torch.Tensor:
        return value.to(device, dtype if dtype is not None and value.is_floating_point() else value.dtype)

    return batch.mapped(move)


def _tensors(batch: Batch) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((batch.args, batch.kwargs, batch.item))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
