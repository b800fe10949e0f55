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
from torch.utils import _pytree as pytree

from ampaudit.core.errors import InputError, UsageError
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.untrusted import describe
from ampaudit.report.model import GIVEN
from ampaudit.source.inputs import inputs_from, unknown_axis
from ampaudit.source.interface import Batch, BatchFactory, ModelSource
from ampaudit.source.open import open_source
from ampaudit.source.unwrapping import auditable, runnable
from ampaudit.source.user_code import calling_user_code
from ampaudit.trace.isolation import preserved
from ampaudit.trace.values import dtype_name, tensors_in

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
    max_batches: int | None = None,
) -> ModelSource:
    """Return a model with its batches.

    Args:
        model: Model in memory, loaded source, or location to load from.
        inputs: One batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs; for a sweep, a
            function that returns a batch of a given size.
        batches: Several batches instead.
        options: Options for loading the model.
        max_batches: Maximum number of batches to take, for loaders that never end.

    Raises:
        InputError: There are no inputs, or a batch has the wrong type.
        AuditError: The model cannot be loaded; see ``open_source``.
    """
    if options is not None and not isinstance(options, SourceConfig):
        raise UsageError(f"source is of type {type(options).__name__}", hint="pass a SourceConfig")
    if inputs is not None and batches is not None:
        raise InputError("give either inputs or batches, not both", hint=_HOW)
    options = options or SourceConfig()
    make_batches: BatchFactory | None = None
    items: Iterable[Any] | None
    if callable(inputs):
        make_batches, items = partial(_sized, inputs), _sized(inputs, options.input_sizes or {})
        options = options.changed(input_sizes=None)  # these sizes are not for the model file's functions
    else:
        items = [inputs] if inputs is not None else _several(batches)
    if isinstance(model, nn.Module):
        model = auditable(model)
        source = ModelSource(type(model).__name__, "object", model, ())
        if items is None:
            return _with_inputs(source, options)
    elif isinstance(model, ModelSource):
        source = model
    elif isinstance(model, str | Path):
        with preserved():
            source = open_source(str(model), options)
    else:
        called = isinstance(model, type) and issubclass(model, nn.Module)
        hint = f"pass an instance: {model.__name__}(...)" if called else "pass a module or a path"
        raise InputError(f"the model is of type {type(model).__name__}", hint=hint)
    if items is None:
        return source
    return replace(
        source,
        model=runnable(source.model, source.location),
        batches=tuple(map(_batch, islice(items, max_batches))),
        inputs=GIVEN,
        make_batches=make_batches,
    )


def _sized(function: SizedInputs, sizes: Mapping[str, int]) -> tuple[Batch, ...]:
    """Call the user's function for inputs of a size."""
    parameters = inspect.signature(function).parameters
    for axis in sizes:
        if axis not in parameters:
            raise unknown_axis(axis, list(parameters), f"write def inputs({axis}): ...")
    if not sizes:
        raise InputError("inputs is a function", hint=f"{_ONE}; with sweep, a function of the axis")
    with calling_user_code("inputs()"):
        inputs = function(**sizes)
    return (_batch(inputs),)


def _with_inputs(source: ModelSource, options: SourceConfig) -> ModelSource:
    """Give a model in memory the inputs that the options name."""
    if options.inputs is None:
        raise InputError("give either inputs or batches", hint=_HOW)
    options.check()
    model = runnable(source.model, source.location)
    make_batches, functions, info = inputs_from(options, model)
    batches = make_batches(options.input_sizes or {})
    return replace(source, model=model, batches=batches, inputs=info, make_batches=make_batches, **functions)


def check_trained(model: Any, optimizer: Any) -> None:
    """Check that a training loop passes a module and an optimizer, not, for example, a path.

    Raises:
        UsageError: One of the two has the wrong type.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"the model is of type {type(model).__name__}", hint="pass the module that is trained"
        )
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise UsageError(
            f"the optimizer is of type {type(optimizer).__name__}",
            hint="pass one of torch.optim, made from the model",
        )


def _several(batches: Any) -> Iterable[Any] | None:
    """Reject values that are not several batches, such as a tensor, which would be split into rows."""
    if batches is None or (
        isinstance(batches, Iterable) and not isinstance(batches, torch.Tensor | Mapping | str)
    ):
        return batches
    hint = f"pass a list or a loader of batches; for one, {_ONE}"
    raise InputError(f"batches is of type {type(batches).__name__}", hint=hint)


def _batch(item: Any) -> Batch:
    if isinstance(item, Batch):
        return item
    if isinstance(item, torch.Tensor):
        return Batch((item,))
    if isinstance(item, Mapping) and all(isinstance(name, str) for name in item):
        return Batch((), dict(item))
    if isinstance(item, Sequence) and not isinstance(item, str):
        return Batch(tuple(item))
    is_dict = isinstance(item, Mapping)
    what = "a dict whose keys are not names" if is_dict else f"of type {type(item).__name__}"
    raise InputError(f"inputs are {what}", hint=_HOW if isinstance(item, Iterable) else _ONE)


def open_against(reference: ModelSource, against: Any, options: SourceConfig) -> ModelSource:
    """Return the audited model, with the inputs of its reference and the reference itself.

    Args:
        reference: Model with the correct outputs.
        against: The audited model, its location, or its opened source.
        options: Options that the reference was opened with; its inputs and weights are not shared.

    Raises:
        InputError: The inputs of the two models do not match.
    """
    if isinstance(against, nn.Module):
        against = auditable(against)
        stored = {t.dtype for t in against.state_dict().values() if t.is_floating_point()}
        dtype = stored.pop() if len(stored) == 1 else torch.float32
        batches = tuple(
            batch.mapped(lambda t: t.to(dtype) if t.is_floating_point() else t) for batch in reference.batches
        )
        audited = ModelSource(type(against).__name__, "object", against, batches)
    elif isinstance(against, ModelSource):
        audited = against
    else:
        loading = SourceConfig(seed=options.seed, train=options.train, trust=options.trust)
        audited = open_source(str(against), loading)
    template = audited.batches[0] if audited.batches else reference.batches[0]
    places = _places(reference, audited, template)
    batches = tuple(_fill(template, batch, places) for batch in reference.batches)
    notes = (*reference.notes, *audited.notes)
    return replace(
        audited, batches=batches, inputs=reference.inputs, notes=notes, reference=reference, places=places
    )


def _places(reference: ModelSource, audited: ModelSource, template: Batch) -> tuple[int, ...]:
    """Match each input of the audited model to one of the reference, by name or else in order."""
    available = _named_tensors(reference.model, reference.batches[0])
    required = _named_tensors(audited.model, template)
    if set(required) <= set(available):
        places = tuple(list(available).index(name) for name in required)
    elif len(required) == len(available):
        places = tuple(range(len(required)))
    else:
        raise InputError(
            f"{describe(audited.location)} takes {len(required)} inputs ({describe(', '.join(required))}), "
            f"and {describe(reference.location)} {len(available)} ({describe(', '.join(available))})",
            hint="compare models with the same inputs",
        )
    for (name, tensor), place in zip(required.items(), places, strict=True):
        other, counterpart = list(available.items())[place]
        if tensor.ndim != counterpart.ndim or tensor.is_floating_point() != counterpart.is_floating_point():
            raise InputError(
                f"the input {describe(name)} is {_type_of(tensor)} in {describe(audited.location)}, and "
                f"{describe(other)} {_type_of(counterpart)} in {describe(reference.location)}",
                hint="compare models with the same inputs",
            )
    return places


def _fill(template: Batch, batch: Batch, places: tuple[int, ...]) -> Batch:
    """Fill the audited model's batch structure with the reference's values, cast to its dtypes."""
    values = tensors_in((batch.args, batch.kwargs))
    matches = (values[place] for place in places)
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda leaf: next(matches).to(leaf.dtype), (template.args, template.kwargs)
    )
    return Batch(args, kwargs, name=batch.name)


def _named_tensors(model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a batch by the names of the model's parameters, in order."""
    try:
        names = [n for n, p in inspect.signature(model.forward).parameters.items() if p.kind <= 1]
    except (TypeError, ValueError):
        names = []
    tensors: dict[str, torch.Tensor] = {}
    names += [f"input[{i}]" for i in range(len(names), len(batch.args))]
    positional = zip(names, batch.args, strict=False)
    for name, value in (*positional, *batch.kwargs.items()):
        leaves = tensors_in(value)
        tensors |= {name if len(leaves) == 1 else f"{name}[{i}]": leaf for i, leaf in enumerate(leaves)}
    return tensors


def _type_of(tensor: torch.Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "a scalar"
    return f"{shape} {dtype_name(tensor.dtype)}"
