"""Defines a scalable stream of values, what changes with it, and the search's view of one op."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import fx
from torch.utils import _pytree as pytree

from ampaudit.trace.functional import overload_of
from ampaudit.trace.opnames import base_name, named_arguments

__all__ = ["AttributeChange", "Degree", "Needed", "Refusal", "ScaledCall", "Stream"]

Degree: TypeAlias = "int | tuple[int | None, ...] | None"


class Needed(Exception):
    """Raised if an operand needs another degree; the reason is reported if it cannot have that degree."""

    def __init__(self, node: fx.Node, degree: int, reason: str) -> None:
        super().__init__(reason)
        self.node, self.degree, self.reason = node, degree, reason


@dataclass(slots=True)
class ScaledCall:
    """One op of the graph, with the degrees of its operands.

    Attributes:
        node: Node of the op.
        name: Name of the op in refusals.
        degrees: Degrees of the nodes before it.
        limit: Largest number of the 16-bit format.
        numbers: For each Python number that scales, such as an eps, its degree, by argument.
        clamps: Whether the op limits scaled values at the format's range.
        arguments: Arguments by name.
    """

    node: fx.Node
    name: str
    degrees: Mapping[fx.Node, Degree]
    limit: float
    numbers: dict[str, int] = field(default_factory=dict)
    clamps: bool = False
    arguments: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        op = overload_of(self.node.target)
        self.arguments = {} if op is None else named_arguments(op, self.node.args, dict(self.node.kwargs))

    @property
    def base(self) -> str:
        """The op without overload and in-place mark; empty if it is not an ATen op."""
        op = overload_of(self.node.target)
        return "" if op is None else base_name(op).rstrip("_")

    def operands(self, *names: str) -> Iterator[tuple[str, Any]]:
        """Yield the tensors and numbers among the named arguments, with lists flattened."""
        for name in names:
            value = self.arguments.get(name)
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, fx.Node | float | int):
                    yield name, item

    def of(self, name: str) -> int | None:
        """Return the degree of an argument; 0 if it is missing or a number."""
        return self.plain(self.arguments.get(name))

    def plain(self, value: Any) -> int | None:
        """Return the degree of a tensor or a number."""
        if not isinstance(value, fx.Node):
            return None if value == 0 and isinstance(value, int | float) else 0
        degree = self.degrees[value]
        if isinstance(degree, tuple):
            raise Needed(value, 0, f"{self.name} reads the stream before a norm")
        return degree

    def equal(self, *names: str) -> int | None:
        """Return the common degree of operands, and record that numbers among them scale as well."""
        operands = [(name, item, self.plain(item)) for name, item in self.operands(*names)]
        tensors = [d for _, item, d in operands if isinstance(item, fx.Node) and d is not None]
        degree = next((d for d in tensors if d), 0 if tensors else None)
        for name, item, own_degree in operands:
            if own_degree in (None, degree) or degree is None:
                continue
            if isinstance(item, fx.Node):
                raise Needed(
                    item, degree, f"{self.name} joins the stream with a value that does not scale alike"
                )
            self.numbers[name] = degree
        return degree if degree is not None or all(d is None for *_, d in operands) else 0

    def only_zero(self, *but: str) -> None:
        """Require degree 0 of all operands except the named arguments."""
        others = [value for name, value in self.arguments.items() if name not in but]
        values = pytree.tree_leaves(others) if self.arguments else self.node.all_input_nodes
        for node in values:  # one value may be several arguments
            if isinstance(node, fx.Node) and self.degrees[node]:
                raise Needed(node, 0, f"{self.name} reads the stream before a norm")


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why nothing can be rescaled."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of values and what scales with it.

    Attributes:
        degrees: Degree of every value that scales; 1 for the stream itself.
        weights: Degrees of the weights that scale, by name; one name for tied weights.
        numbers: Degrees of the Python numbers that scale, by node and argument.
        clamps: Ops that limit the stream at the format's range.
    """

    degrees: Mapping[fx.Node, int]
    weights: Mapping[str, int]
    numbers: Mapping[tuple[fx.Node, str], int]
    clamps: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """A number attribute of a module that is multiplied by a power of two.

    Attributes:
        module: Path of the module.
        name: Name of the attribute.
        old: Value before the change; the default of the dtype if the module has ``None``.
        power: Exponent of two.
    """

    module: str
    name: str
    old: float
    power: int

    @property
    def new(self) -> float:
        """The value after the change."""
        return math.ldexp(self.old, self.power)
