"""Emulates sums in which every addition rounds, like atomic additions to a 16-bit tensor on a GPU.

The CPU adds some of them up in float32. Here all of them go through ``index_put_``, whose CPU kernel adds one
element after the other in the tensor's own type. A GPU adds in another order from run to run: the size of the
error is the same, its value is not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from ampaudit.trace.opnames import base_name, mutated_arguments, named_arguments
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["accumulate", "accumulates", "multiplies"]

Named = dict[str, Any]
# the values of ``reduce`` with which an op adds
_ADDS: dict[str, tuple[str | None, ...]] = {
    "index_add": (None,),
    "index_reduce": ("mean",),
    "scatter": ("add",),
    "scatter_add": (None,),
    "scatter_reduce": ("sum", "mean"),
}


def accumulates(op: OpOverload, args: tuple[Any, ...], kwargs: Named) -> bool:
    """Return whether the call adds up elements in a 16-bit tensor one by one."""
    adds = _ADDS.get(base_name(op).rstrip("_")) if op.namespace == "aten" else None
    if adds is None or args[0].dtype not in LOW_PRECISION_DTYPES:
        return False
    return named_arguments(op, args, kwargs).get("reduce") in adds


def multiplies(op: OpOverload, args: tuple[Any, ...], kwargs: Named) -> bool:
    """Return whether the call multiplies elements one by one, which is not emulated."""
    reduces = op.namespace == "aten" and base_name(op).rstrip("_") in _ADDS
    return reduces and named_arguments(op, args, kwargs).get("reduce") in ("prod", "multiply")


def accumulate(op: OpOverload, args: tuple[Any, ...], kwargs: Named) -> torch.Tensor:
    """Compute such a call, in its first argument if the op is in-place."""
    named = named_arguments(op, args, kwargs)
    result = named["self"].clone()
    into = result.reshape(1) if result.ndim == 0 else result
    index = named["index"].reshape(1) if named["index"].ndim == 0 else named["index"]
    whole = base_name(op).startswith("index")  # then an index stands for a whole slice
    places = _places(into, named["dim"] % into.ndim, index, whole)
    values = _values(named, into, index, whole)
    include_self = named.get("include_self", True)
    if not include_self:
        into.index_put_(places, into.new_zeros(()))
    into.index_put_(places, values, accumulate=True)
    if named.get("reduce") == "mean":
        counts = torch.full_like(into, float(include_self))
        counts.index_put_(places, torch.ones_like(values), accumulate=True)
        into.div_(counts.masked_fill_(counts == 0, 1))
    result = into.reshape(result.shape)
    return named["self"].copy_(result) if mutated_arguments(op) else result  # type: ignore[no-any-return]


def _places(into: torch.Tensor, dim: int, index: torch.Tensor, whole: bool) -> tuple[torch.Tensor, ...]:
    """Return, for each dimension, coordinates that broadcast to the shape of the values."""
    sizes = [into.shape[d] if whole else index.shape[d] for d in range(into.ndim)]
    places = []
    for d, size in enumerate(sizes):
        shape = [1] * into.ndim
        shape[d] = -1
        places.append(torch.arange(size, device=into.device).view(shape))
    places[dim] = index.view([-1 if d == dim else 1 for d in range(into.ndim)]) if whole else index
    return tuple(places)


def _values(named: Named, into: torch.Tensor, index: torch.Tensor, whole: bool) -> torch.Tensor:
    source = next(named[name] for name in ("source", "src", "value") if name in named)
    if not isinstance(source, torch.Tensor):
        return torch.full(index.shape, source, dtype=into.dtype, device=into.device)
    source = source.reshape(1) if source.ndim == 0 else source
    if whole:
        return source * named["alpha"] if named.get("alpha", 1) != 1 else source
    return source[tuple(slice(0, size) for size in index.shape)]
