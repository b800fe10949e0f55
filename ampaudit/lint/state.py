"""What is true at a point of a script: values of names, and facts about gradients; and how two paths join."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Final, TypeAlias

from ampaudit.lint.values import MAYBE, Value, join_values

__all__ = ["EMPTY", "Contribution", "Fact", "Key", "State", "join"]


@dataclass(frozen=True, slots=True)
class Contribution:
    """One backward pass whose gradients are in ``.grad``.

    Attributes:
        scaler: key of the scaler that scaled the loss, or empty.
        node: the call of ``backward``.
        under: 16-bit dtype of the autocast that the loss was computed under, or empty.
    """

    scaler: str
    node: ast.AST
    under: str = ""


Key: TypeAlias = tuple[str, ...] | tuple[str, int, str]
Fact: TypeAlias = object
EMPTY: Final[frozenset[Contribution]] = frozenset()
_NAMES: Final = ("var", "attr")


class State:
    """Facts by key. A fact that differs between two joined paths becomes ``MAYBE``; a name, ``UNKNOWN``."""

    __slots__ = ("facts",)

    def __init__(self, facts: dict[Key, Fact] | None = None) -> None:
        self.facts: dict[Key, Fact] = {} if facts is None else facts

    def copy(self) -> State:
        """For the other branch."""
        return State(self.facts.copy())

    def get(self, *key: str) -> Fact:
        """A fact; ``None`` if nothing was ever said."""
        return self.facts.get(key)

    def put(self, value: Fact, *key: str) -> None:
        """Say a fact."""
        self.facts[key] = value

    def value(self, frame: int, name: str) -> Value | None:
        """What a name stands for in a frame."""
        return self.facts.get(("var", frame, name))  # type: ignore[return-value]

    def bind(self, frame: int, name: str, value: Value) -> None:
        """Assign a name."""
        self.facts[("var", frame, name)] = value

    def forget(self, *start: str) -> None:
        """All facts that begin so may be otherwise now."""
        count = len(start)
        for key in self.facts:
            if key[:count] == start:
                self.facts[key] = MAYBE

    def clear(self, *start: str) -> None:
        """All facts that begin so are no longer true."""
        count = len(start)
        for key in [key for key in self.facts if key[:count] == start]:
            del self.facts[key]

    def where(self, *start: str) -> list[tuple[Key, Fact]]:
        """Facts that begin so."""
        count = len(start)
        return [(key, fact) for key, fact in self.facts.items() if key[:count] == start]


def join(one: State | None, other: State | None) -> State | None:
    """After two paths; ``None`` is a path that ends before."""
    if one is None or other is None:
        return one if other is None else other
    left, right = one.facts, other.facts
    joined: dict[Key, Fact] = {}
    for key, fact in left.items():
        second = right.get(key)
        if second is fact or second == fact:
            joined[key] = fact
        elif key[0] in _NAMES:
            # a name that only one branch assigns is not used where it is missing
            joined[key] = fact if key not in right else join_values(fact, second)  # type: ignore[arg-type]
        else:
            joined[key] = MAYBE
    for key, fact in right.items():
        if key not in left:
            joined[key] = fact if key[0] in _NAMES or fact is None else MAYBE
    return State(joined)
