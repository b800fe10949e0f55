"""The arguments of a call."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from ampaudit.linter.flow.syntax import keyword_value
from ampaudit.linter.flow.values import UNKNOWN, Value

__all__ = ["Arguments"]


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call.

    Attributes:
        positional: Values by position.
        keywords: Values by name.
        node: Call expression.
    """

    positional: list[Value]
    keywords: dict[str, Value]
    node: ast.Call

    def get(self, index: int, name: str) -> Value | None:
        """Return the value of a parameter, by position or name."""
        if index < len(self.positional):
            return self.positional[index]
        return self.keywords.get(name)

    @property
    def first(self) -> Value:
        """The first positional value; unknown if there is none."""
        return self.positional[0] if self.positional else UNKNOWN

    def all(self) -> list[Value]:
        """Return all values."""
        return [*self.positional, *self.keywords.values()]

    def named(self) -> dict[str, Value]:
        """Return the values by name or, as text, by position, as ``inline_call`` takes them."""
        return {**{str(index): value for index, value in enumerate(self.positional)}, **self.keywords}

    def expression(self, index: int, name: str) -> ast.expr | None:
        """Return the expression of an argument."""
        if index < len(self.node.args):
            return self.node.args[index]
        return keyword_value(self.node, name)
