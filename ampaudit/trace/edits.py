"""Edits single ops while a model is traced, to try what its author could write instead.

An edit takes the op as the model calls it and returns the op to trace in its place. Sites keep their ids,
so a run with an edit can be compared with one without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from ampaudit.trace.op_calls import OpCalled
from ampaudit.trace.opnames import base_name, converts

__all__ = [
    "Bypass",
    "Edit",
    "FuseLogSigmoid",
    "FuseLogSoftmax",
    "History",
    "ReplaceConstant",
    "ScaleOperand",
]

aten = torch.ops.aten
Emit = Callable[..., Any]


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


class Edit(Protocol):
    """One edit; ``looks_back`` says whether it needs the call that returned its input."""

    looks_back: ClassVar[bool]

    def __call__(self, called: OpCalled, history: History, emit: Emit) -> OpCalled:
        """Return the op to trace instead; ``emit(op, *args)`` traces further ops before it."""


@dataclass(frozen=True, slots=True)
class ReplaceConstant:
    """Replaces a Python number by a larger eps, or by a mask value in range.

    Attributes:
        old: The number to replace.
        new: Its replacement.
    """

    old: float
    new: float
    looks_back: ClassVar[bool] = False

    def __call__(self, called: OpCalled, history: History, emit: Emit) -> OpCalled:
        """Return the same op with the new number."""
        del history, emit

        def change(value: Any) -> Any:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return self.new if is_number and value == self.old else value

        return OpCalled(
            called.op, tuple(map(change, called.args)), {k: change(v) for k, v in called.kwargs.items()}
        )


class FuseLogSoftmax:
    """Replaces ``log(softmax(x))`` by ``log_softmax(x)``."""

    looks_back: ClassVar[bool] = True

    def __call__(self, called: OpCalled, history: History, emit: Emit) -> OpCalled:
        """The fused op in place of the log."""
        del emit
        producer = history.of(called.args[0])
        if producer is None or base_name(producer.op) != "softmax":
            return called
        return OpCalled(aten.log_softmax.int, producer.args, producer.kwargs)


class FuseLogSigmoid:
    """Replaces ``log(sigmoid(x))`` by ``logsigmoid(x)``, ``log(1 - sigmoid(x))`` by ``logsigmoid(-x)``."""

    looks_back: ClassVar[bool] = True

    def __call__(self, called: OpCalled, history: History, emit: Emit) -> OpCalled:
        """The fused op in place of the log."""
        producer, negative = history.of(called.args[0]), False
        if producer is not None and base_name(producer.op) in ("rsub", "sub"):
            tensors = [arg for arg in producer.args[:2] if isinstance(arg, torch.Tensor)]
            producer, negative = history.of(tensors[-1]), True
        if producer is None or base_name(producer.op) != "sigmoid":
            return called
        x = producer.args[0]
        return OpCalled(aten.log_sigmoid.default, (emit(aten.neg.default, x) if negative else x,), {})


@dataclass(frozen=True, slots=True)
class ScaleOperand:
    """Scales the first operand of a product, so that scores are scaled before they are summed.

    ``einsum`` takes its operands as a list after the equation.
    """

    factor: float
    looks_back: ClassVar[bool] = False

    def __call__(self, called: OpCalled, history: History, emit: Emit) -> OpCalled:
        """Return the product with the scaled operand."""
        del history
        first, *rest = called.args
        if isinstance(first, str):
            (operand, *others), *more = rest
            scaled = [emit(aten.mul.Scalar, operand, self.factor), *others]
            return OpCalled(called.op, (first, scaled, *more), called.kwargs)
        return OpCalled(called.op, (emit(aten.mul.Scalar, first, self.factor), *rest), called.kwargs)


class Bypass:
    """Skips an op: its first operand becomes the result."""

    looks_back: ClassVar[bool] = False

    def __call__(self, called: OpCalled, history: History, emit: Emit) -> OpCalled:
        """Return a view of the operand."""
        del history, emit
        return OpCalled(aten.alias.default, called.args[:1], {})
