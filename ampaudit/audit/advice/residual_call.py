"""Defines a stream of values that scales, what changes with it, and one op as the search sees it."""

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
    """An operand needs another degree; the reason counts where it cannot have it."""

    def __init__(self, node: fx.Node, degree: int, reason: str) -> None:
        super().__init__(reason)
        self.node, self.degree, self.reason = node, degree, reason


@dataclass(slots=True)
class ScaledCall:
    """One op of the graph, with the degrees of its operands.

    Attributes:
        node: of the op.
        name: how to call it in a reason.
        degrees: of the nodes before it.
        limit: largest number of the 16-bit format.
        numbers: Python numbers, by argument, that scale with the values they meet, such as an eps.
        clamps: whether the op limits values that scale at the format's range.
        given: arguments by name.
    """

    node: fx.Node
    name: str
    degrees: Mapping[fx.Node, Degree]
    limit: float
    numbers: dict[str, int] = field(default_factory=dict)
    clamps: bool = False
    given: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        op = overload_of(self.node.target)
        self.given = {} if op is None else named_arguments(op, self.node.args, dict(self.node.kwargs))

    @property
    def base(self) -> str:
        """The op without overload and in-place mark; empty for what is no ATen op."""
        op = overload_of(self.node.target)
        return "" if op is None else base_name(op).rstrip("_")

    def operands(self, *names: str) -> Iterator[tuple[str, Any]]:
        """Yield tensors and numbers among the arguments of these names; members of lists one by one."""
        for name in names:
            value = self.given.get(name)
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, fx.Node | float | int):
                    yield name, item

    def of(self, name: str) -> int | None:
        """Return the degree of an argument; that of a missing one, or a number, is 0."""
        return self.plain(self.given.get(name))

    def plain(self, value: Any) -> int | None:
        """Return the degree of a tensor or a number."""
        if not isinstance(value, fx.Node):
            return None if value == 0 and isinstance(value, int | float) else 0
        degree = self.degrees[value]
        if isinstance(degree, tuple):
            raise Needed(value, 0, f"{self.name} reads the stream before a norm")
        return degree

    def equal(self, *names: str) -> int | None:
        """Return the one degree of all these operands; numbers are to be scaled with the tensors."""
        found = [(name, item, self.plain(item)) for name, item in self.operands(*names)]
        tensors = [d for _, item, d in found if isinstance(item, fx.Node) and d is not None]
        degree = next((d for d in tensors if d), 0 if tensors else None)
        for name, item, own in found:
            if own in (None, degree) or degree is None:
                continue
            if isinstance(item, fx.Node):
                raise Needed(
                    item, degree, f"{self.name} joins the stream with a value that does not scale alike"
                )
            self.numbers[name] = degree
        return degree if degree is not None or all(d is None for *_, d in found) else 0

    def only_zero(self, *but: str) -> None:
        """Require degree 0 of all operands, but for the arguments of these names."""
        others = [value for name, value in self.given.items() if name not in but]
        given = pytree.tree_leaves(others) if self.given else self.node.all_input_nodes
        for node in given:  # one value may be several arguments
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
        degrees: of every value that scales; 1 for the stream itself.
        weights: names of the weights that scale, with their degrees; one name for tied weights.
        numbers: Python numbers that scale, by node and argument.
        clamps: ops that limit the stream at the format's range.
    """

    degrees: Mapping[fx.Node, int]
    weights: Mapping[str, int]
    numbers: Mapping[tuple[fx.Node, str], int]
    clamps: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """A number that a module holds, which is multiplied by a power of two.

    Attributes:
        module: its path.
        name: of the attribute.
        old: its value; that of the dtype where the module has none.
        power: the exponent of two.
    """

    module: str
    name: str
    old: float
    power: int

    @property
    def new(self) -> float:
        """The value after the change."""
        return math.ldexp(self.old, self.power)
