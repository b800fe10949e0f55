"""What is true at a point of a script: values of names, and facts about gradients; and how two paths join."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Final, TypeAlias

from ampaudit.lint.flow.joining import join_values
from ampaudit.lint.flow.values import MAYBE, Value

__all__ = ["NO_CONTRIBUTIONS", "Contribution", "Fact", "FactKey", "State", "join"]


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
    computed_under: str = ""


FactKey: TypeAlias = tuple[str, ...]
Fact: TypeAlias = object
Scope: TypeAlias = int | str  # a call of a function, or an object by its key
_MODEL_FACTS: Final = ("half", "device")
NO_CONTRIBUTIONS: Final[frozenset[Contribution]] = frozenset()


class State:
    """Facts by key, and names by scope. A fact that differs between two joined paths becomes ``MAYBE``.

    A copy shares its scopes until one side writes to them, so that branches cost what they change.
    """

    __slots__ = ("_owned", "facts", "scopes")

    def __init__(
        self, facts: dict[FactKey, Fact] | None = None, scopes: dict[Scope, dict[str, Value]] | None = None
    ) -> None:
        self.facts: dict[FactKey, Fact] = {} if facts is None else facts
        self.scopes: dict[Scope, dict[str, Value]] = {} if scopes is None else scopes
        self._owned: set[Scope] = set()

    def copy(self) -> State:
        """For the other branch."""
        self.share()
        return State(self.facts.copy(), self.scopes.copy())

    def share(self) -> None:
        """Write to copies of the scopes from now on."""
        self._owned.clear()

    def fork(self) -> State:
        """For code that is called from elsewhere: names and models as they are, no gradients known."""
        self.share()
        return State({k: v for k, v in self.facts.items() if k[0] in _MODEL_FACTS}, self.scopes.copy())

    def may_hold(self, *start: str) -> bool:
        """Whether any fact that begins so is, or may be, true."""
        return any(fact is not None for _, fact in self.matching(*start))

    def equals(self, other: State) -> bool:
        """Whether all is as it was."""
        return self.facts == other.facts and self.scopes == other.scopes

    def get(self, *key: str) -> Fact:
        """A fact; ``None`` if nothing was ever said."""
        return self.facts.get(key)

    def set_fact(self, value: Fact, *key: str) -> None:
        """Say a fact."""
        self.facts[key] = value

    def value(self, scope: Scope, name: str) -> Value | None:
        """What a name stands for in a scope, or an attribute in an object."""
        names = self.scopes.get(scope)
        return None if names is None else names.get(name)

    def bind(self, scope: Scope, name: str, value: Value) -> None:
        """Assign a name or an attribute."""
        if scope not in self._owned:
            self.scopes[scope] = self.scopes.get(scope, {}).copy()
            self._owned.add(scope)
        self.scopes[scope][name] = value

    def drop_scope(self, scope: Scope) -> None:
        """A function has returned: its names are gone."""
        self.scopes.pop(scope, None)
        self._owned.discard(scope)

    def invalidate(self, *start: str) -> None:
        """All facts that begin so may be otherwise now."""
        count = len(start)
        for key in self.facts:
            if key[:count] == start:
                self.facts[key] = MAYBE

    def clear(self, *start: str) -> None:
        """All facts that begin so are no longer true."""
        for key in [key for key, _ in self.matching(*start)]:
            del self.facts[key]

    def matching(self, *start: str) -> list[tuple[FactKey, Fact]]:
        """Facts that begin so."""
        count = len(start)
        return [(key, fact) for key, fact in self.facts.items() if key[:count] == start]


def join(one: State | None, other: State | None) -> State | None:
    """After two paths; ``None`` is a path that ends before."""
    if one is None or other is None:
        return one if other is None else other
    left, right = one.facts, other.facts
    facts: dict[FactKey, Fact] = {}
    for key, fact in left.items():
        second = right.get(key)
        facts[key] = fact if second is fact or second == fact else MAYBE
    for key, fact in right.items():
        if key not in left:
            facts[key] = fact if fact is None else MAYBE
    scopes: dict[Scope, dict[str, Value]] = {}
    for scope, names in one.scopes.items():
        others = other.scopes.get(scope, names)
        scopes[scope] = names if others is names else _join_names(names, others)
    for scope, names in other.scopes.items():
        scopes.setdefault(scope, names)
    one.share()  # neither may write to what the joined state has of them
    other.share()
    return State(facts, scopes)


def _join_names(names: dict[str, Value], others: dict[str, Value]) -> dict[str, Value]:
    """A name that only one path assigns is not used where it is missing."""
    joined = {**others, **names}
    for name, value in names.items():
        second = others.get(name, value)
        if second is not value:
            joined[name] = join_values(value, second)
    return joined
