"""``--against``: opens the model to audit, and gives it the inputs of its reference."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.core.errors import InputError
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.untrusted import describe
from ampaudit.source.interface import Batch, ModelSource
from ampaudit.source.open import open_source
from ampaudit.source.unwrapping import auditable
from ampaudit.trace.entry import tensor_leaves

__all__ = ["beside"]


def beside(reference: ModelSource, against: Any, options: SourceConfig) -> ModelSource:
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
    values = tensor_leaves(batch.args, batch.kwargs)
    leaves, structure = pytree.tree_flatten((template.args, template.kwargs))
    remaining = iter(places)
    filled = [
        values[next(remaining)].to(leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    ]
    args, kwargs = pytree.tree_unflatten(filled, structure)
    return Batch(args, kwargs, name=batch.name)


def _named_tensors(model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a batch by the names of the model's parameters, in order."""
    try:
        names = [n for n, p in inspect.signature(model.forward).parameters.items() if p.kind <= 1]
    except (TypeError, ValueError):
        names = []
    tensors: dict[str, torch.Tensor] = {}
    positional = (
        (names[i] if i < len(names) else f"input[{i}]", value) for i, value in enumerate(batch.args)
    )
    for name, value in (*positional, *batch.kwargs.items()):
        leaves = tensor_leaves((value,), {})
        tensors |= {name if len(leaves) == 1 else f"{name}[{i}]": leaf for i, leaf in enumerate(leaves)}
    return tensors


def _type_of(tensor: torch.Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "a scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"
