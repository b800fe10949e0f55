"""Rewrites calls of ops: dtype arguments, numbers that are stored, and ``out=`` variants.

An edit takes the op as the model calls it and returns the op to trace in its place. Sites keep their ids,
so a run with an edit can be compared with one without.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.core.ops import having
from ampaudit.core.text import is_number
from ampaudit.policy.schema import Constants
from ampaudit.trace.internals import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    proxy_of,
    track_tensor_tree,
    without_modes,
)
from ampaudit.trace.opnames import (
    argument_kinds,
    argument_names,
    base_name,
    converts,
    mutated_arguments,
    named_arguments,
    op_name,
)
from ampaudit.trace.values import CASTABLE_DTYPES, dtype_name, sizes_of, tensors_in

aten = torch.ops.aten
Emit = Callable[..., Any]
_PRODUCTS = having("product", "added_product", "weighted") | {"convolution_backward"}
# arguments that would be tensors if they were not constants; eps and p are attributes
_OPERANDS = frozenset({"self", "other", "value", "min", "max", "exponent"})


@dataclass(frozen=True, slots=True)
class OpCalled:
    """An op and its arguments."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by name; those left at their default are absent."""
        return named_arguments(self.op, self.args, self.kwargs)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments, also those in lists."""
        return tensors_in((self.args, self.kwargs))


def record_described(mode: ProxyTorchDispatchMode, called: OpCalled, result: Any) -> Any:
    """Record a call whose (fake) result was found without torch's tracer, and return the result."""
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda tensor: proxy_of(mode, tensor), (called.args, called.kwargs)
    )
    proxy = mode.tracer.create_proxy("call_function", called.op, args, kwargs, name=base_name(called.op))
    return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)


def with_dtype(called: OpCalled) -> OpCalled:
    """Set an unset ``dtype`` to float32; like autocast, only for 16-bit input."""
    arguments = called.named
    first = arguments.get(argument_names(called.op)[0])
    if arguments.get("dtype") is None and getattr(first, "dtype", None) in CASTABLE_DTYPES:
        return replace(called, kwargs=called.kwargs | {"dtype": torch.float32})
    return called


def with_dtype_overload(called: OpCalled) -> OpCalled:
    """Call the overload of a norm that takes a dtype, with float32."""
    names = {"Scalar": "ScalarOpt_dtype", "ScalarOpt_dim": "ScalarOpt_dim_dtype"}
    overload: OpOverload = getattr(called.op.overloadpacket, names[called.op._overloadname])
    # it has no defaults
    arguments = {each.name: each.default_value for each in called.op._schema.arguments} | called.named
    return OpCalled(overload, tuple(arguments.values()), {"dtype": torch.float32})


def with_low_precision_dtype(called: OpCalled, dtype: torch.dtype) -> OpCalled:
    """Replace ``dtype=float32``, which in an FP32 graph comes from the trace."""
    if converts(called.op) or called.kwargs.get("dtype") is not torch.float32:
        return called
    return replace(called, kwargs=called.kwargs | {"dtype": dtype})


def with_stored_numbers(
    called: OpCalled, limits: Constants | None, dtype: torch.dtype | None
) -> tuple[OpCalled, dict[int | str, Any]]:
    """Clip Python numbers that are operands to the limits, and round them to a dtype.

    Returns:
        The call to trace, and the original value of each argument that changed, by position or name.
    """
    originals: dict[int | str, Any] = {}

    def stored(key: int | str, name: str, value: Any) -> Any:
        if name not in _OPERANDS or not isinstance(value, float) or not value or not math.isfinite(value):
            return value
        number = value
        if limits is not None:
            magnitude = min(max(abs(value), limits.min_positive), limits.max_finite)
            number = math.copysign(magnitude, value)
        if dtype is not None:
            with without_modes():
                number = float(torch.tensor(number, dtype=torch.float64).to(torch.float32).to(dtype))
        if number != value:
            originals[key] = value
        return number

    if limits is None and dtype is None:
        return called, {}
    pairs = zip(argument_names(called.op), called.args, strict=False)
    args = tuple(stored(position, name, value) for position, (name, value) in enumerate(pairs))
    kwargs = {name: stored(name, name, value) for name, value in called.kwargs.items()}
    return OpCalled(called.op, args, kwargs), originals


def refuse_mixed_product(called: OpCalled) -> None:
    """Raise if the factors of a product differ in dtype, as kernels do and fake tensors do not."""
    dtypes = {a.dtype for a in called.args if isinstance(a, torch.Tensor) and a.is_floating_point()}
    if base_name(called.op) in _PRODUCTS and len(dtypes) > 1:
        names = " and ".join(sorted(map(dtype_name, dtypes)))
        raise RuntimeError(f"{op_name(called.op)} of {names}: expected both to have the same dtype")


@cache
def _out_arguments(op: OpOverload) -> tuple[str, ...]:
    """Return the names of the ``out=`` arguments, which the op writes its results to."""
    outputs = [op._schema.arguments[position] for position in mutated_arguments(op)]
    only = all(argument.kwarg_only and str(argument.type) == "Tensor" for argument in outputs)
    return tuple(argument.name for argument in outputs) if only else ()


@cache
def functional_overload(op: OpOverload) -> OpOverload | None:
    """Return the functional overload; its additional arguments have defaults."""
    names = _out_arguments(op)
    if not names:
        return None
    required = [kind for kind in argument_kinds(op) if kind[0] not in names]
    candidates: list[tuple[int, OpOverload]] = []
    for overload in op.overloadpacket.overloads():
        other: OpOverload = getattr(op.overloadpacket, overload)
        kinds = argument_kinds(other)
        more = [a for a, kind in zip(other._schema.arguments, kinds, strict=True) if kind not in required]
        takes_all = len(other._schema.arguments) - len(more) == len(required)
        if takes_all and not mutated_arguments(other) and all(a.has_default_value() for a in more):
            candidates.append((len(more), other))
    return min(candidates, key=lambda pair: pair[0])[1] if candidates else None


def resize_outputs(called: OpCalled) -> tuple[dict[str, Any], list[torch.Tensor], list[bool]]:
    """Call an op with ``out=`` once, unrecorded, which raises its errors and resizes its outputs.

    Returns:
        Keyword arguments for the functional overload, the output tensors, and whether each was resized.
    """
    op, kwargs = called.op, called.kwargs
    names = _out_arguments(op)
    outs: list[torch.Tensor] = [kwargs[name] for name in names]
    before = [sizes_of(out) for out in outs]
    with disable_proxy_modes_tracing():
        op(*called.args, **kwargs)
    rest = {name: value for name, value in kwargs.items() if name not in names}
    other = functional_overload(op)
    if other is not None and "dtype" in set(argument_names(other)) - set(argument_names(op)):
        # it makes a tensor from numbers, in the dtype of ``out=``
        rest |= {"dtype": outs[0].dtype, "device": outs[0].device}
    return rest, outs, [sizes_of(out) != size for out, size in zip(outs, before, strict=True)]


class History:
    """Remembers the call that returned each tensor of a trace, and keeps the tensors alive.

    torch.export takes a constant that outlives its op for one of the model's own, so calls are only recorded
    for edits that look back.
    """

    def __init__(self) -> None:
        self._producers: dict[int, tuple[Any, OpCalled]] = {}

    def note(self, result: Any, called: OpCalled) -> None:
        """Record a call and its result."""
        if isinstance(result, torch.Tensor):
            self._producers[id(result)] = (result, called)

    def of(self, value: Any) -> OpCalled | None:
        """Return the call that returned a value, before any casts."""
        entry = self._producers.get(id(value))
        while entry is not None and converts(entry[1].op):
            entry = self._producers.get(id(entry[1].args[0]))
        return entry[1] if entry is not None else None


# returns the op to trace instead; ``emit(op, *args)`` traces further ops before it
Edit = Callable[[OpCalled, History, Emit], OpCalled]


@dataclass(frozen=True, slots=True)
class ReplaceConstant:
    """Replaces a Python number by a larger eps, or by a mask value in range."""

    old: float  # the number to replace
    new: float  # its replacement

    def __call__(self, called: OpCalled, history: History, emit: Emit) -> OpCalled:
        """Return the same op with the new number."""
        del history, emit

        def change(value: Any) -> Any:
            return self.new if is_number(value) and value == self.old else value

        return OpCalled(
            called.op, tuple(map(change, called.args)), {k: change(v) for k, v in called.kwargs.items()}
        )


def fuse_log_softmax(called: OpCalled, history: History, emit: Emit) -> OpCalled:
    """Replace ``log(softmax(x))`` by ``log_softmax(x)``."""
    del emit
    producer = history.of(called.args[0])
    if producer is None or base_name(producer.op) != "softmax":
        return called
    return OpCalled(aten.log_softmax.int, producer.args, producer.kwargs)


def fuse_log_sigmoid(called: OpCalled, history: History, emit: Emit) -> OpCalled:
    """Replace ``log(sigmoid(x))`` by ``logsigmoid(x)``, ``log(1 - sigmoid(x))`` by ``logsigmoid(-x)``."""
    producer, negative = history.of(called.args[0]), False
    if producer is not None and base_name(producer.op) in ("rsub", "sub"):
        tensors = [arg for arg in producer.args[:2] if isinstance(arg, torch.Tensor)]
        producer, negative = history.of(tensors[-1]), True
    if producer is None or base_name(producer.op) != "sigmoid":
        return called
    x = producer.args[0]
    return OpCalled(aten.log_sigmoid.default, (emit(aten.neg.default, x) if negative else x,), {})


# the edits that need the call that returned their input
LOOKING_BACK: tuple[Edit, ...] = (fuse_log_softmax, fuse_log_sigmoid)


@dataclass(frozen=True, slots=True)
class ScaleOperand:
    """Scales the first operand of a product, so that scores are scaled before they are summed.

    ``einsum`` takes its operands as a list after the equation.
    """

    factor: float

    def __call__(self, called: OpCalled, history: History, emit: Emit) -> OpCalled:
        """Return the product with the scaled operand."""
        del history
        first, *rest = called.args
        if isinstance(first, str):
            (operand, *others), *more = rest
            scaled = [emit(aten.mul.Scalar, operand, self.factor), *others]
            return OpCalled(called.op, (first, scaled, *more), called.kwargs)
        return OpCalled(called.op, (emit(aten.mul.Scalar, first, self.factor), *rest), called.kwargs)


def bypass(called: OpCalled, history: History, emit: Emit) -> OpCalled:
    """Skip an op: a view of its first operand becomes the result."""
    del history, emit
    return OpCalled(aten.alias.default, called.args[:1], {})
