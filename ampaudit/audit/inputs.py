"""Accepts models and inputs as Python passes them, and turns them into a source."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampaudit.core.errors import InputError, UsageError
from ampaudit.core.source_config import SourceConfig
from ampaudit.report.inputs import GIVEN
from ampaudit.source import Batch, ModelSource
from ampaudit.source.inputs import inputs_from, unknown_axis
from ampaudit.source.interface import Sized
from ampaudit.source.open import open_source
from ampaudit.source.python_file import runnable
from ampaudit.source.unwrapping import auditable
from ampaudit.source.user_code import calling_user_code
from ampaudit.trace.isolation import preserved

__all__ = ["Inputs", "ModelLike", "SizedInputs", "as_source", "check_trained"]

Inputs = torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
SizedInputs = Callable[..., Inputs]  # by axis, for a sweep
ModelLike = nn.Module | ModelSource | str | Path
_HOW = "pass one batch as inputs, or several as batches=[...]"
_ONE = "pass a tensor, a tuple or a dict"


def as_source(
    model: ModelLike,
    inputs: Inputs | SizedInputs | None = None,
    batches: Iterable[Inputs] | None = None,
    options: SourceConfig | None = None,
    *,
    most: int | None = None,
) -> ModelSource:
    """Return a model with its batches.

    Args:
        model: in memory; or loaded already; or where it is to be loaded from.
        inputs: one batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs; for a sweep, a
            function that makes one of a given size.
        batches: several batches instead.
        options: how to load it.
        most: the number of batches to take at most, of a loader that never ends.

    Raises:
        InputError: there are no inputs, or a batch is something else.
        AuditError: the model cannot be loaded; see ``open_source``.
    """
    if options is not None and not isinstance(options, SourceConfig):
        raise UsageError(f"source is of type {type(options).__name__}", hint="pass a SourceConfig")
    if inputs is not None and batches is not None:
        raise InputError("give either inputs or batches, not both", hint=_HOW)
    options = options or SourceConfig()
    sized: Sized | None = None
    given: Iterable[Any] | None
    if callable(inputs):
        sized, given = partial(_sized, inputs), _sized(inputs, options.input_sizes or {})
        options = options.changed(input_sizes=None)  # not of the functions in the model's file
    else:
        given = [inputs] if inputs is not None else _several(batches)
    if isinstance(model, nn.Module):
        model = auditable(model)
        source = ModelSource(type(model).__name__, "object", model, ())
        model = source if given is not None else _with_inputs(source, options)
    elif not isinstance(model, ModelSource | str | Path):
        called = isinstance(model, type) and issubclass(model, nn.Module)
        hint = f"pass an instance: {model.__name__}(...)" if called else "pass a module or a path"
        raise InputError(f"the model is of type {type(model).__name__}", hint=hint)
    elif not isinstance(model, ModelSource):
        with preserved():
            model = open_source(str(model), options)
    if given is None:
        return model
    made = runnable(model.model, model.location)
    found = tuple(map(_batch, islice(given, most)))
    return replace(model, model=made, batches=found, inputs=GIVEN, sized=sized)


def _sized(function: SizedInputs, sizes: Mapping[str, int]) -> tuple[Batch, ...]:
    """Call the user's function for inputs of a size."""
    known = inspect.signature(function).parameters
    for axis in sizes:
        if axis not in known:
            raise unknown_axis(axis, list(known), f"write def inputs({axis}): ...")
    if not sizes:
        raise InputError("inputs is a function", hint=f"{_ONE}; with sweep, a function of the axis")
    with calling_user_code("inputs()"):
        made = function(**sizes)
    return (_batch(made),)


def _with_inputs(source: ModelSource, options: SourceConfig | None) -> ModelSource:
    """Give a model in memory the inputs that the options name."""
    if options is None or options.inputs is None:
        raise InputError("give either inputs or batches", hint=_HOW)
    options.check()
    model = runnable(source.model, source.location)
    sized, functions, info = inputs_from(options, model)
    batches = sized(options.input_sizes or {})
    return replace(source, model=model, batches=batches, inputs=info, sized=sized, **functions)


def check_trained(model: Any, optimizer: Any) -> None:
    """Refuse what a training loop cannot have, such as the location of a model.

    Raises:
        UsageError: one of the two is something else.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is of type {type(model).__name__}", hint="pass the module that is trained"
        )
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        what = type(optimizer).__name__
        raise UsageError(
            f"the optimizer is of type {what}", hint="pass one of torch.optim, made from the model"
        )


def _several(batches: Any) -> Iterable[Any] | None:
    """Check what is given as several batches: a tensor would be taken apart, row by row."""
    if batches is None or (
        isinstance(batches, Iterable) and not isinstance(batches, torch.Tensor | Mapping | str)
    ):
        return batches
    what = type(batches).__name__
    raise InputError(
        f"batches is of type {what}", hint=f"pass a list or a loader of batches; for one, {_ONE}"
    )


def _batch(item: Any) -> Batch:
    if isinstance(item, Batch):
        return item
    if isinstance(item, torch.Tensor):
        return Batch((item,))
    if isinstance(item, Mapping) and all(isinstance(name, str) for name in item):
        return Batch((), dict(item))
    if isinstance(item, Sequence) and not isinstance(item, str):
        return Batch(tuple(item))
    what = "a dict whose keys are no names" if isinstance(item, Mapping) else f"of type {type(item).__name__}"
    raise InputError(f"inputs are {what}", hint=_HOW if isinstance(item, Iterable) else _ONE)
