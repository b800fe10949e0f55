"""Accepts models and inputs as Python passes them, and turns them into a source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampaudit.core.config import SourceConfig
from ampaudit.core.errors import InputError
from ampaudit.report.inputs import GIVEN
from ampaudit.source import Batch, ModelSource
from ampaudit.source.interface import unwrapped
from ampaudit.source.open import open_source
from ampaudit.source.training_step import runnable
from ampaudit.trace.isolation import preserved

__all__ = ["Inputs", "ModelLike", "as_source"]

Inputs = torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
ModelLike = nn.Module | ModelSource | str | Path
_HOW = "scan(model, inputs) or scan(model, batches=[...])"


def as_source(
    model: ModelLike,
    inputs: Inputs | None = None,
    batches: Iterable[Inputs] | None = None,
    options: SourceConfig | None = None,
) -> ModelSource:
    """Return a model with its batches.

    Args:
        model: in memory; or loaded already; or where it is to be loaded from.
        inputs: one batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
        batches: several batches instead.
        options: how to load it.

    Raises:
        InputError: there are no inputs, or a batch is something else.
        AuditError: the model cannot be loaded; see ``open_source``.
    """
    if inputs is not None and batches is not None:
        raise InputError("give either inputs or batches, not both", hint=_HOW)
    given = [inputs] if inputs is not None else batches
    if isinstance(model, nn.Module):
        if given is None:
            raise InputError("give either inputs or batches", hint=_HOW)
        model = unwrapped(model)
        model = ModelSource(type(model).__name__, "object", model, ())
    elif not isinstance(model, ModelSource | str | Path):
        raise InputError(f"the model is of type {type(model).__name__}", hint="pass a module or a path")
    elif not isinstance(model, ModelSource):
        with preserved():
            model = open_source(str(model), options or SourceConfig())
    if given is None:
        return model
    made = runnable(model.model, model.location)
    return replace(model, model=made, batches=tuple(map(_batch, given)), inputs=GIVEN)


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
