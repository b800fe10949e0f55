"""The registry of transfer functions, which map the intervals of an op's inputs to that of its output.

A transfer function is registered for exact overloads. It takes its arguments from an ``OpCall`` by the names
of ATen's schema; its result is discarded if an argument that differs from its default was not read. So an
argument that a transfer function ignores by mistake makes a value unbounded, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.bounds.interval import Axes, Interval, finite, unbounded
from ampaudit.bounds.stored import UNIT_ROUNDOFF, as_number, converted, rounding
from ampaudit.trace.opnames import base_name, named_arguments
from ampaudit.trace.values import as_read

ELEMENTARY = 2.0**-20  # relative error of exp, tanh and the like: 16 roundoffs, more than libraries promise
VANISHING = 2.0**-63  # magnitude below which a square may vanish in float32
MAX_ROOT = 2.0**63  # L2 norm up to which a sum of squares is finite in float32
_IRRELEVANT = frozenset({"layout", "device", "pin_memory", "memory_format", "non_blocking", "copy"})


class DuplicateTransfer(Exception):
    """Raised for a second transfer function of one op."""


@dataclass(frozen=True, slots=True)
class KnownTensor:
    """A known weight or constant, with bounds on the error of the value that the graph holds."""

    tensor: torch.Tensor  # before the graph rounds it
    relative: float = 0.0
    absolute: float = 0.0  # in addition

    @property
    def wide(self) -> torch.Tensor:
        """The value in at least float32, to compute norms and products."""
        return self.tensor.float() if self.tensor.dtype in (torch.float16, torch.bfloat16) else self.tensor

    def rounded_to(self, dtype: torch.dtype) -> KnownTensor:
        """Return the value after a cast to a floating-point dtype."""
        relative, absolute = rounding(dtype)
        grown = self.relative + relative + self.relative * relative
        return KnownTensor(self.tensor, grown, self.absolute * (1 + relative) + absolute)


@dataclass(frozen=True, slots=True)
class OpCall:
    """One op and the bounds of its inputs."""

    node: fx.Node
    op: OpOverload
    arguments: Mapping[str, Any]  # by name, including defaults; values of the graph are nodes
    intervals: Mapping[fx.Node, Any]  # an interval, or a list of intervals
    known: Mapping[fx.Node, KnownTensor]  # weights and constants
    limit: float  # largest finite value of the 16-bit format; sharper bounds are sought only beyond it
    shapes: list[tuple[int, ...]]  # of the outputs
    read: set[str] = field(default_factory=set)  # arguments that the transfer function has read

    @property
    def name(self) -> str:
        """The op without overload and in-place suffix: ``add``."""
        return base_name(self.op).rstrip("_")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first output."""
        return self.shapes[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the op computes: the requested one, or that of its output."""
        requested = self.arg("dtype") if "dtype" in self.arguments else None
        dtype: torch.dtype = requested if requested is not None else _first(self.node.meta["val"]).dtype
        return dtype

    def arg(self, name: str) -> Any:
        """Return an argument as it appears in the graph."""
        self.read.add(name)
        return self.arguments.get(name)

    def ignore(self, *names: str) -> None:
        """Declare that these arguments do not affect the result."""
        self.read.update(names)

    def has(self, name: str) -> bool:
        """Return whether an argument is given and not None."""
        if self.arguments.get(name) is not None:
            return True
        self.read.add(name)
        return False

    def number(self, name: str) -> float | None:
        """Return an argument that is a Python number; ``None`` if it is not one."""
        value = self.arg(name)
        return float(value) if isinstance(value, int | float) else None

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a Python number as float32 and as 16-bit kernels read it; empty if it is not a number."""
        number = self.number(name)
        return () if number is None else tuple({number, float(as_read(number, self.dtype))})

    def interval(self, name: str) -> Interval:
        """Return the interval of an argument, in the dtype in which the op computes."""
        value, dtype = self.arg(name), self.dtype
        if isinstance(value, fx.Node):
            tensor = _first(value.meta["val"])
            if not isinstance(tensor, torch.Tensor):  # a size, or a number out of a tensor
                return unbounded(())
            return converted(self.intervals[value], tensor.dtype, dtype)
        return as_number(float(value), dtype)

    def items(self, name: str) -> list[Interval]:
        """Return the interval of each tensor of a list, in the dtype in which the op computes."""
        nodes = [item for item in self.arg(name) if isinstance(item, fx.Node)]
        return [converted(self.intervals[n], _first(n.meta["val"]).dtype, self.dtype) for n in nodes]

    def weight(self, name: str, default: float | None = None) -> KnownTensor | None:
        """Return the value of an argument, if it is a known weight or constant, or the default without it."""
        value = self.arg(name)
        if value is None and default is not None:
            return KnownTensor(torch.tensor(default))
        weight = self.known.get(value) if isinstance(value, fx.Node) else None
        if weight is None or not weight.tensor.is_floating_point():
            return None
        dtype, source_dtype = _first(self.node.meta["val"]).dtype, value.meta["val"].dtype
        weight = replace(weight, tensor=weight.wide)
        return weight if source_dtype is dtype or not dtype.is_floating_point else weight.rounded_to(dtype)

    @property
    def unread(self) -> list[str]:
        """Arguments that matter but were never read."""
        defaults = _defaults(self.op)
        return [
            name
            for name, value in self.arguments.items()
            if name not in self.read
            and name not in _IRRELEVANT
            and not (name in defaults and _same(value, defaults[name]))
        ]


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) else value


def _same(value: Any, default: Any) -> bool:
    if isinstance(value, fx.Node) or isinstance(default, fx.Node):
        return False
    return bool(value == default) and type(value) is type(default)


@cache
def _defaults(op: OpOverload) -> dict[str, Any]:
    return {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}


def arguments_of(op: OpOverload, node: fx.Node) -> dict[str, Any]:
    """Return all arguments of a call by name, including defaults."""
    return {**_defaults(op), **named_arguments(op, node.args, dict(node.kwargs))}


Transfer = Callable[[OpCall], "Interval | list[Interval]"]
Function = TypeVar("Function", bound=Transfer)


@dataclass(frozen=True, slots=True)
class RegisteredTransfer:
    """A transfer function, and the ops that it applies to."""

    function: Transfer
    integers: bool = False  # whether it also describes the op on integers, apart from their wrap-around
    exact: bool = False  # whether the op gives the same bits on every device: constants can be computed
    moves: bool = False  # whether every output element is one of the input, so that a weight stays known
    empty: bool = False  # whether it accepts operands without elements


TRANSFERS: dict[OpOverload, RegisteredTransfer] = {}


def transfer(
    *ops: str, integers: bool = False, exact: bool = False, moves: bool = False, empty: bool = False
) -> Callable[[Function], Function]:
    """Register a function for ATen overloads such as ``add.Tensor``, and for their in-place forms.

    Raises:
        DuplicateTransfer: An overload already has a transfer function.
        AttributeError: There is no such overload.
    """

    def register(function: Function) -> Function:
        exactly_same = exact or moves
        entry = RegisteredTransfer(function, integers or exactly_same, exactly_same, moves, empty)
        for op in ops:
            name, _, overload = op.partition(".")
            target = getattr(getattr(torch.ops.aten, name), overload or "default")
            for each in (target, *_in_place(target)):
                if each in TRANSFERS:
                    raise DuplicateTransfer(str(each))
                TRANSFERS[each] = entry
        return function

    return register


def _in_place(op: OpOverload) -> list[OpOverload]:
    """Return ``add_.Tensor`` for ``add.Tensor``, if it takes the same arguments."""
    twin = getattr(getattr(torch.ops.aten, f"{base_name(op)}_", None), op._overloadname or "default", None)
    names = [[a.name for a in each._schema.arguments] for each in (op, twin) if each is not None]
    return [twin] if twin is not None and names[0] == names[1] else []


def summation_error(terms: int) -> float:
    """Return n*u / (1 - n*u), the relative error of a float32 sum in any order (Higham 2002, 3.1)."""
    product = terms * UNIT_ROUNDOFF
    return product / (1.0 - product) if product < 0.5 else float("inf")


def output_interval(
    call: OpCall, low: torch.Tensor, high: torch.Tensor, norms: Axes | None = None
) -> Interval:
    """Return the interval of an op's output from ends that broadcast to it."""
    low, high = (ends[(None,) * (len(call.shape) - ends.ndim)] for ends in (low, high))
    return Interval(call.shape, finite(low, -1), finite(high, 1), dict(norms or {}))
