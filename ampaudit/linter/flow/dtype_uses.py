"""The ops of a script that run on values of a known dtype."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from ampaudit.linter.diagnostic import Certainty, position_of
from ampaudit.linter.flow.values import Tensor, Value

__all__ = ["DtypeUses"]


@dataclass(slots=True)
class DtypeUses:
    """Ops by the dtype of an operand.

    Attributes:
        ops: Certainty of each op's dtype, by dtype.
        half_lines: First lines of statements under float16 autocast.
    """

    ops: dict[str, dict[ast.AST, Certainty]] = field(default_factory=dict)
    half_lines: set[int] = field(default_factory=set)

    def record(self, node: ast.AST, operands: Iterable[Value], certainty: Certainty) -> None:
        """Record the dtypes of the operands of an op."""
        for dtype in {value.dtype for value in operands if isinstance(value, Tensor) and value.dtype}:
            certainties = self.ops.setdefault(dtype, {})
            certainties[node] = max(certainty, certainties.get(node, certainty))

    def positions(self, dtype: str) -> dict[tuple[int, int], Certainty]:
        """Return the positions of ops with an operand of a dtype, and of their arguments."""
        return {
            position_of(part): certainty
            for node, certainty in self.ops.get(dtype, {}).items()
            for part in (node, *ast.iter_child_nodes(node))
        }
