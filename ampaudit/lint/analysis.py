"""Reads a whole script: the module, then every function and class that nothing in it calls.

Conditions such as ``if use_amp:`` are followed both ways and joined; then the script is read again with each
of its most frequent ones taken to be true, and to be false. A mistake counts if it is certain in one of these
readings.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ampaudit.lint.diagnostic import Diagnostic, Event, position_of
from ampaudit.lint.flow.expressions import EXPRESSIONS
from ampaudit.lint.flow.inlining import enter
from ampaudit.lint.flow.machine import OFF, UNSURE, Machine, TooLong
from ampaudit.lint.flow.script import Script, has_own_context
from ampaudit.lint.flow.state import State
from ampaudit.lint.flow.statements import STATEMENTS
from ampaudit.lint.flow.values import (
    Autocast,
    ClassInfo,
    FunctionInfo,
    Instance,
    Symbol,
    Value,
)
from ampaudit.lint.rules import accumulation, bookkeeping, constants, functions, graphs, regions, spelling

__all__ = ["read"]

_FLAGS = 3
_PER_ROOT = (accumulation.check, regions.check, graphs.check, bookkeeping.check_root)


def read(script: Script, known: Mapping[str, Value]) -> tuple[list[Diagnostic], dict[str, Value]]:
    """Every mistake in a script, in the order of its lines; and what its names stand for at its end.

    Args:
        script: the module.
        known: names given from outside.
    """
    machine = Machine(script, STATEMENTS, EXPRESSIONS, {}, known)
    roots: list[list[Event]] = []
    end = _follow(machine, roots, _Root(None, None, State()))
    for info in script.functions.values():
        if info.busy and info not in machine.called:
            _follow(machine, roots, _Root(info, None, end))
    for described in script.classes.values():
        _read_class(machine, roots, end, described)
    bookkeeping.check_file(machine, roots)
    regions.check_file(machine, roots)
    found = dict(machine.found)
    for item in (*constants.check(script), *spelling.check(script), *functions.check(script)):
        found.setdefault((item.code, *position_of(item.node)), item)
    ordered = sorted(found.items(), key=lambda pair: (pair[0][1], pair[0][2], pair[0][0]))
    names: dict[str, Value] = {k: v for k, v in end.scopes.get(0, {}).items() if isinstance(v, Symbol)}
    return [item for _, item in ordered], names


@dataclass(frozen=True)
class _Root:
    """Where reading begins: the module if there is no function; a method has an owner."""

    info: FunctionInfo | None
    owner: Instance | None
    start: State

    @cached_property
    def context(self) -> Autocast:
        """What surrounds it: nothing, or who knows what."""
        return OFF if self.info is None or has_own_context(self.info.node) else UNSURE


def _follow(machine: Machine, roots: list[list[Event]], root: _Root) -> State:
    """Read a root; then again under each of its most frequent conditions, both ways."""
    machine.flags.clear()
    end = _once(machine, root, roots)
    if not any(event.kind in _TRAINING for event in roots[-1]):
        return end
    for flag, _ in machine.flags.most_common(_FLAGS):
        for answer in (True, False):
            machine.assume = {flag: answer}
            _once(machine, root, [])
    machine.assume = {}
    return end


def _once(machine: Machine, root: _Root, roots: list[list[Event]]) -> State:
    info = root.info
    machine.state, machine.guards, machine.rounds = root.start.anew(), (), 0
    machine.frame, machine.loops, machine.returns, machine.grad = 0, [], [], []
    machine.contexts = [root.context]
    with contextlib.suppress(TooLong):
        if info is None:
            machine.block(machine.script.tree.body)
        else:
            static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in info.node.decorator_list)
            enter(machine, info, info.node, {}, None if static else root.owner, 0)
    machine.stack.clear()
    _finish(machine, roots)
    return machine.state or State()


def _read_class(machine: Machine, roots: list[list[Event]], end: State, info: ClassInfo) -> None:
    owner = Instance(f"class {info.node.name}", info)
    machine.managed = info.derives("LightningModule", "LightningLite", "Callback")
    start = info.methods.get("__init__")
    if start is not None and start.busy:
        end = _follow(machine, roots, _Root(start, owner, end))
    for method in info.methods.values():
        if method.busy and method is not start and method not in machine.called:
            _follow(machine, roots, _Root(method, owner, end))
    machine.managed = False


_TRAINING = frozenset({"backward", "forward", "scaler.scale", "scaler.step", "scaler.unscale", "clip"})


def _finish(machine: Machine, roots: list[list[Event]]) -> None:
    """The rules about the root that was just followed."""
    events = list(machine.events.values())
    machine.events = {}
    machine.restart()
    if not machine.managed:
        for check in _PER_ROOT:
            check(machine, events)
    else:
        machine.found = {key: item for key, item in machine.found.items() if key[0] in _ALSO_MANAGED}
    roots.append(events)


_ALSO_MANAGED = frozenset({"AMP844", "AMP845", "AMP846", "AMP848", "AMP850"})
