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
        reference: whose outputs are right.
        against: the audited model, its location, or its opened source.
        options: how the reference was opened; inputs and weights are the reference's alone.

    Raises:
        InputError: the inputs of the two models do not fit.
    """
    own = SourceConfig(seed=options.seed, train=options.train, trust=options.trust)
    if isinstance(against, nn.Module):
        against = auditable(against)
        stored = {t.dtype for t in against.state_dict().values() if t.is_floating_point()}
        dtype = stored.pop() if len(stored) == 1 else torch.float32
        batches = tuple(
            batch.mapped(lambda t: t.to(dtype) if t.is_floating_point() else t) for batch in reference.batches
        )
        audited = ModelSource(type(against).__name__, "object", against, batches)
    else:
        audited = against if isinstance(against, ModelSource) else open_source(str(against), own)
    template = audited.batches[0] if audited.batches else reference.batches[0]
    places = _places(reference, audited, template)
    batches = tuple(_filled(template, batch, places) for batch in reference.batches)
    notes = (*reference.notes, *audited.notes)
    return replace(
        audited, batches=batches, inputs=reference.inputs, notes=notes, reference=reference, places=places
    )


def _places(reference: ModelSource, audited: ModelSource, template: Batch) -> tuple[int, ...]:
    """Return for each input of the audited model the place of the reference's: by name, or else in order."""
    given = _named(reference.model, reference.batches[0])
    wanted = _named(audited.model, template)
    if set(wanted) <= set(given):
        places = tuple(list(given).index(name) for name in wanted)
    elif len(wanted) == len(given):
        places = tuple(range(len(wanted)))
    else:
        raise InputError(
            f"{describe(audited.location)} takes {len(wanted)} inputs ({describe(', '.join(wanted))}), and "
            f"{describe(reference.location)} {len(given)} ({describe(', '.join(given))})",
            hint="compare models with the same inputs",
        )
    for (name, tensor), place in zip(wanted.items(), places, strict=True):
        other, known = list(given.items())[place]
        if tensor.ndim != known.ndim or tensor.is_floating_point() != known.is_floating_point():
            raise InputError(
                f"the input {describe(name)} is {_shown(tensor)} in {describe(audited.location)}, and "
                f"{describe(other)} {_shown(known)} in {describe(reference.location)}",
                hint="compare models with the same inputs",
            )
    return places


def _filled(template: Batch, batch: Batch, places: tuple[int, ...]) -> Batch:
    """Return a batch of the audited model's form with the reference's values, in the dtypes that it takes."""
    given = tensor_leaves(batch.args, batch.kwargs)
    leaves, structure = pytree.tree_flatten((template.args, template.kwargs))
    remaining = iter(places)
    filled = [
        given[next(remaining)].to(leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    ]
    args, kwargs = pytree.tree_unflatten(filled, structure)
    return Batch(args, kwargs, name=batch.name)


def _named(model: nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a batch by the names of the model's parameters, in order."""
    try:
        names = [n for n, p in inspect.signature(model.forward).parameters.items() if p.kind <= 1]
    except (TypeError, ValueError):
        names = []
    found: dict[str, torch.Tensor] = {}
    positional = (
        (names[i] if i < len(names) else f"input[{i}]", value) for i, value in enumerate(batch.args)
    )
    for name, value in (*positional, *batch.kwargs.items()):
        leaves = tensor_leaves((value,), {})
        found |= {name if len(leaves) == 1 else f"{name}[{i}]": leaf for i, leaf in enumerate(leaves)}
    return found


def _shown(tensor: torch.Tensor) -> str:
    shape = "x".join(map(str, tensor.shape)) or "a scalar"
    return f"{shape} {str(tensor.dtype).removeprefix('torch.')}"
