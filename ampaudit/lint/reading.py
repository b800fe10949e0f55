"""Reads a whole script: the module, then every function and class that nothing in it calls.

Conditions such as ``if use_amp:`` are followed both ways and joined; then the script is read again with each
of its most frequent ones taken to be true, and to be false. A mistake counts if it is certain in one of these
readings.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ampaudit.lint.expressions import EXPRESSIONS
from ampaudit.lint.found import Event, Found
from ampaudit.lint.machine import OFF, UNSURE, Machine, TooLong
from ampaudit.lint.rules import accumulation, bookkeeping, constants, functions, graphs, regions, spelling
from ampaudit.lint.script import Script, has_own_context
from ampaudit.lint.state import State
from ampaudit.lint.statements import STATEMENTS
from ampaudit.lint.values import (
    ClassInfo,
    FunctionInfo,
    Instance,
    Symbol,
    Value,
)

__all__ = ["Seen", "read"]

_FLAGS = 3
_PER_ROOT = (accumulation.check, regions.check, graphs.check, bookkeeping.check_root)


@dataclass(slots=True)
class Seen:
    """All that one reading of a script saw.

    Attributes:
        events: of each root.
        machine: that read it.
    """

    machine: Machine
    events: list[list[Event]] = field(default_factory=list)


def read(script: Script, known: Mapping[str, Value]) -> tuple[list[Found], dict[str, Value]]:
    """Every mistake in a script, in the order of its lines; and what its names stand for at its end.

    Args:
        script: the module.
        known: names given from outside.
    """
    found: dict[tuple[str, int, int], Found] = {}
    names: dict[str, Value] = {}
    for assume in _worlds(script):
        machine = Machine(script, STATEMENTS, EXPRESSIONS, assume, known)
        seen = Seen(machine)
        names = _read(machine, seen) or names
        bookkeeping.check_file(machine, seen.events)
        regions.check_file(machine, seen.events)
        for key, item in machine.found.items():
            found.setdefault(key, item)
    for item in (*constants.check(script), *spelling.check(script), *functions.check(script)):
        found.setdefault((item.code, item.node.lineno, item.node.col_offset), item)  # type: ignore[attr-defined]
    ordered = sorted(found.items(), key=lambda pair: (pair[0][1], pair[0][2], pair[0][0]))
    return [item for _, item in ordered], names


def _worlds(script: Script) -> Iterator[dict[str, bool]]:
    yield {}
    for flag in script.flags[:_FLAGS]:
        yield {flag: True}
        yield {flag: False}


def _read(machine: Machine, seen: Seen) -> dict[str, Value]:
    """Follow every root of a script; the names of the module at its end."""
    script = machine.script
    with contextlib.suppress(TooLong):
        machine.block(script.tree.body)
    _finish(machine, seen)
    end = machine.state or State()
    names: dict[str, Value] = {
        key[2]: value
        for key, value in end.facts.items()
        if key[0] == "var" and key[1] == 0 and isinstance(value, Symbol)
    }
    for info in script.functions.values():
        if info.busy and info not in machine.called:
            _root(machine, seen, end, info, None)
    for described in script.classes.values():
        _read_class(machine, seen, end, described)
    return names


def _read_class(machine: Machine, seen: Seen, end: State, info: ClassInfo) -> None:
    owner = Instance(f"class {info.node.name}", info)
    managed = info.derives("LightningModule", "LightningLite", "Callback")
    machine.managed = managed
    start = info.methods.get("__init__")
    if start is not None and start.busy:
        _root(machine, seen, end, start, owner)
        end = State({**end.facts, **{k: v for k, v in (machine.state or end).facts.items() if k[0] in _KEPT}})
    for method in info.methods.values():
        if method.busy and method is not start and method not in machine.called:
            _root(machine, seen, end, method, owner)
    machine.managed = False


_KEPT = ("attr", "half", "device")


def _root(machine: Machine, seen: Seen, end: State, info: FunctionInfo, owner: Instance | None) -> None:
    """Follow a function that nobody in the file calls, with arguments that are not known."""
    kept = {k: v for k, v in end.facts.items() if k[0] in ("var", *_KEPT)}
    machine.state, machine.guards = State(kept), ()
    machine.frame, machine.loops, machine.returns = 0, [], []
    machine.contexts = [OFF if has_own_context(info.node) else UNSURE]
    machine.grad = []
    machine.rounds = 0
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in info.node.decorator_list)
    try:
        machine.enter(info, info.node, {}, None if static else owner, 0)
    except TooLong:
        machine.stack.clear()
    _finish(machine, seen)


def _finish(machine: Machine, seen: Seen) -> None:
    """The rules about the root that was just followed."""
    events = list(machine.events.values())
    machine.events = {}
    machine.restart()
    if not machine.managed:
        for check in _PER_ROOT:
            check(machine, events)
    else:
        machine.found = {key: item for key, item in machine.found.items() if key[0] in _ALSO_MANAGED}
    seen.events.append(events)


_ALSO_MANAGED = frozenset({"AMP844", "AMP845", "AMP846", "AMP848", "AMP850"})
