"""Records diagnostics and events with the place in the flow where each was found."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ampaudit.linter.diagnostic import Certainty, Diagnostic, Fix, key_of, position_of
from ampaudit.linter.flow.event_place import EventPlace, Guard
from ampaudit.linter.flow.events import Event
from ampaudit.linter.flow.values import Managed

__all__ = ["Recorder"]


_OF_DTYPES: Final = frozenset(
    "AMP842 AMP844 AMP845 AMP846 AMP860 AMP861 AMP868 AMP869 AMP872 AMP873 AMP874".split()
)


class Recorder:
    """What was found so far, and where the flow is: its statement, and the guards around it."""

    def __init__(self) -> None:
        self.diagnostics: dict[tuple[str, int, int], Diagnostic] = {}
        self.events: dict[tuple[type[Event], ast.AST, tuple[Guard, ...]], Event] = {}
        self.managers: set[Managed] = set()
        self.guards: tuple[Guard, ...] = ()
        self.statement: ast.stmt | None = None
        self.muted = False
        self.guesses = False  # whether the class of a model was guessed

    def report(
        self,
        code: str,
        node: ast.AST,
        cause: str,
        advice: str,
        fix: Fix | None = None,
        certainty: Certainty = Certainty.KNOWN,
    ) -> None:
        """Report a diagnostic, once per rule and position, with the highest certainty of its paths."""
        if self.muted:
            return
        node = self.placed(node)
        if self.guesses and code in _OF_DTYPES:
            certainty = min(certainty, Certainty.LIKELY)
        key = (code, *position_of(node))
        known = self.diagnostics.get(key)
        if known is None or known.certainty < certainty:
            self.diagnostics[key] = Diagnostic(code, node, cause, advice, fix, certainty)

    def at(self, node: ast.AST) -> EventPlace:
        """Return the place of a node in the flow."""
        return EventPlace(self.placed(node), self.guards, self.statement)

    def record(self, event: Event) -> None:
        """Record an event, once per type, node and guards."""
        self.events.setdefault((type(event), event.node, event.guards), event)

    def placed(self, node: ast.AST) -> ast.AST:
        """Return where to report a node."""
        return node

    @contextmanager
    def guarded(self, kind: str, node: ast.AST) -> Iterator[None]:
        """Execute inside a loop, a branch or a call."""
        outside = self.guards
        self.guards = (*outside, Guard(kind, node))
        try:
            yield
        finally:
            self.guards = outside

    @property
    def calls(self) -> list[ast.Call]:
        """The calls that lead here, outermost first."""
        nodes = (guard.node for guard in self.guards if guard.kind == "call")
        return [node for node in nodes if isinstance(node, ast.Call)]

    @property
    def call_path(self) -> str:
        """The calls that lead here, as text, which tells apart two calls of one function."""
        return "".join(f" from {key_of(call)}" for call in self.calls)
