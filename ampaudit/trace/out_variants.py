"""Ops that write their result into a tensor that they are given: ``torch.mv(a, b, out=c)``.

Such a call is traced as the op that returns its result, and a ``copy_`` of that into the tensor: one way to
write memory instead of two, for everything that reads the graph.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from ampaudit.trace.opnames import mutated_arguments
from ampaudit.trace.sizes import sizes_of

__all__ = ["out_arguments", "returning", "written_into"]


@cache
def out_arguments(op: OpOverload) -> tuple[str, ...]:
    """Names of the keyword-only arguments that the op writes its results into."""
    written = [op._schema.arguments[position] for position in mutated_arguments(op)]
    only = all(argument.kwarg_only and str(argument.type) == "Tensor" for argument in written)
    return tuple(argument.name for argument in written) if only else ()


@cache
def returning(op: OpOverload) -> OpOverload | None:
    """The overload that computes the same and returns it; arguments that it has more have defaults."""
    names = out_arguments(op)
    if not names:
        return None
    taken = [_kind(argument) for argument in op._schema.arguments if argument.name not in names]
    found: list[tuple[int, OpOverload]] = []
    for overload in op.overloadpacket.overloads():
        other: OpOverload = getattr(op.overloadpacket, overload)
        more = [a for a in other._schema.arguments if _kind(a) not in taken]
        takes_all = len(other._schema.arguments) - len(more) == len(taken)
        if takes_all and not mutated_arguments(other) and all(a.has_default_value() for a in more):
            found.append((len(more), other))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _kind(argument: Any) -> tuple[str, str]:
    return argument.name, str(argument.type)


def written_into(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], list[torch.Tensor], list[bool]]:
    """Call the op once, unrecorded, for its errors and because it gives its outputs their size.

    Returns:
        Keyword arguments of the op that returns its results, the tensors that they go to, and which of those
        the op has resized.
    """
    names = out_arguments(op)
    outs: list[torch.Tensor] = [kwargs[name] for name in names]
    before = [sizes_of(out) for out in outs]
    with disable_proxy_modes_tracing():
        op(*args, **kwargs)
    rest = {name: value for name, value in kwargs.items() if name not in names}
    other = returning(op)
    if other is not None and _is_factory(op, other):
        rest |= {"dtype": outs[0].dtype, "device": outs[0].device}
    return rest, outs, [sizes_of(out) != size for out, size in zip(outs, before, strict=True)]


def _is_factory(op: OpOverload, other: OpOverload) -> bool:
    """An op that makes a tensor out of numbers: the one that it writes to says the dtype."""
    names = {argument.name for argument in op._schema.arguments}
    return any(a.name == "dtype" and a.name not in names for a in other._schema.arguments)
