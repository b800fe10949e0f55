"""Wraps a model and inputs in memory as a source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ampaudit.core.errors import InputError
from ampaudit.source import Batch, ModelSource

__all__ = ["Inputs", "source_of"]

Inputs = torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


def source_of(model: nn.Module, batches: Iterable[Inputs]) -> ModelSource:
    """Wrap a model and batches, each a tensor, a tuple of positional inputs, or a dict of keyword inputs.

    Raises:
        InputError: a batch is something else.
    """
    return ModelSource(type(model).__name__, "object", model, tuple(_batch(item) for item in batches))


def _batch(item: Any) -> Batch:
    if isinstance(item, Batch):
        return item
    if isinstance(item, torch.Tensor):
        return Batch((item,))
    if isinstance(item, Mapping):
        return Batch((), dict(item))
    if isinstance(item, Sequence) and not isinstance(item, str):
        return Batch(tuple(item))
    raise InputError(f"inputs are of type {type(item).__name__}", hint="pass a tensor, a tuple or a dict")
