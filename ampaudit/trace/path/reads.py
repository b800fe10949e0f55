"""Records the values that a model's Python code reads from tensors, and what it decides on them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from ampaudit.core.sites import SourceLine
from ampaudit.trace.stack import running_lines
from ampaudit.trace.values import inexact

Values = Mapping[int, Any]
_NO_OPERAND = object()


class ReadKind(StrEnum):
    """What Python makes of a tensor's values."""

    CHOICE = "choice"  # a boolean or an integer: Python may branch on it
    NUMBER = "number"  # a float
    ARRAY = "array"  # a NumPy array, a list or a plain float, which Python may compute with


@dataclass(frozen=True, slots=True)
class PythonDecision:
    """What Python decided on a float that it read, such as a comparison."""

    taken: Any  # result for the FP32 values
    source: SourceLine | None  # innermost line of the model's code that decides
    caller: SourceLine | None  # the user's line that calls it, if that is another one
    # function that repeats the decision on other values, keyed by the numbers of the reads
    evaluate: Callable[[Values], Any]

    def differs(self, values: Values) -> bool:
        """Return whether the decision differs for other values."""
        try:
            return bool(self.evaluate(values) != self.taken)
        except (ArithmeticError, ValueError):
            return True  # int(inf)
        except RecursionError:
            return False  # too long a computation to repeat


@dataclass(slots=True)
class ValueRead:
    """One read of a tensor's values by the model's code."""

    number: int  # of the read's mark in the graph
    name: str  # method that reads the values, such as ``item`` or ``numpy``
    kind: ReadKind  # of what the method returns
    layer: str  # path of the module whose forward reads the values
    source: SourceLine | None  # innermost line of the model's code
    caller: SourceLine | None  # the user's line that calls it, if that is another one
    value: torch.Tensor  # during the trace, on the CPU
    # decisions on the float, if the read returns one
    decisions: list[PythonDecision] = field(default_factory=list)


def python_value(name: str, value: torch.Tensor) -> Any:
    """Return the Python value of a read: all values for ``numpy`` and ``tolist``, else the only one."""
    if name == "numpy":
        return value.numpy()
    if name == "tolist":
        return value.tolist()
    return bool(value) if name in ("bool", "equal") else value.item()


class ReadValues:
    """Collects the reads of one trace."""

    def __init__(self) -> None:
        self.reads: list[ValueRead] = []  # the reads in the order of the run

    def add(self, name: str, layer: str, value: torch.Tensor) -> ValueRead:
        """Record a read."""
        exact = name == "bool" or not inexact(value)
        kind = ReadKind.CHOICE if exact else ReadKind.NUMBER
        leaves = name == "numpy" or (name in ("tolist", "float") and not exact)
        kind = ReadKind.ARRAY if leaves else kind
        source, caller = running_lines()
        read = ValueRead(len(self.reads), name, kind, layer, source, caller, value)
        self.reads.append(read)
        return read

    def tracked(self, read: ValueRead, value: Any) -> Any:
        """Return the value that Python gets: a float is wrapped, to record the decisions on it."""
        if not isinstance(value, float):
            return value
        return ReadNumber.create(value, self, (read.number,), operator.itemgetter(read.number))

    def decide(self, numbers: Sequence[int], result: Any, evaluate: Callable[[Values], Any]) -> None:
        """Record a decision on floats that were read."""
        self.reads[numbers[-1]].decisions.append(PythonDecision(result, *running_lines(), evaluate))


class ReadNumber(float):
    """A float that was read from a tensor: arithmetic with numbers keeps track of it.

    What Python decides on it (comparisons, truth, rounding to an integer) is recorded, to be repeated with
    the values of the 16-bit run.
    """

    reads: ReadValues
    numbers: tuple[int, ...]
    evaluate: Callable[[Values], Any]

    @classmethod
    def create(
        cls, value: float, reads: ReadValues, numbers: tuple[int, ...], evaluate: Callable[[Values], Any]
    ) -> ReadNumber:
        """Make a number from its value and how it follows from the reads."""
        number = cls(value)
        number.reads, number.numbers, number.evaluate = reads, numbers, evaluate
        return number

    def __reduce__(self) -> Any:
        """Copy as a plain float."""
        return float, (float(self),)

    def __hash__(self) -> int:
        return float.__hash__(self)


def _combined(first: Any, second: Any, function: Callable[..., Any]) -> Callable[[Values], Any]:
    def evaluate(values: Values) -> Any:
        left = first.evaluate(values) if isinstance(first, ReadNumber) else first
        right = second.evaluate(values) if isinstance(second, ReadNumber) else second
        return function(left) if right is _NO_OPERAND else function(left, right)

    return evaluate


def _method(name: str, function: Callable[..., Any], *, decides: bool, swapped: bool = False) -> None:
    """Define a method of ``ReadNumber`` that keeps track of the number, or records a decision."""
    plain = getattr(float, name)

    def method(self: ReadNumber, *others: Any) -> Any:
        result = plain(self, *others)
        if result is NotImplemented or len(others) > 1:
            return result
        other = others[0] if others and others[0] is not None else _NO_OPERAND
        evaluate = _combined(other, self, function) if swapped else _combined(self, other, function)
        numbers = self.numbers + (other.numbers if isinstance(other, ReadNumber) else ())
        if decides:
            self.reads.decide(numbers, result, evaluate)
            return result
        return (
            ReadNumber.create(result, self.reads, numbers, evaluate) if isinstance(result, float) else result
        )

    setattr(ReadNumber, name, method)


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _method(f"__{_name}__", getattr(operator, _name), decides=True)
_ROUNDING: dict[str, Callable[..., Any]] = {
    **{"bool": bool, "int": int, "round": round},
    **{"trunc": math.trunc, "floor": math.floor, "ceil": math.ceil},
}
for _name, _function in _ROUNDING.items():
    _method(f"__{_name}__", _function, decides=True)
for _name in ("add", "sub", "mul", "truediv", "mod", "pow", "floordiv"):
    _method(f"__{_name}__", getattr(operator, _name), decides=False)
    _method(f"__r{_name}__", getattr(operator, _name), decides=False, swapped=True)
for _name in ("neg", "abs", "pos"):
    _method(f"__{_name}__", getattr(operator, _name), decides=False)
