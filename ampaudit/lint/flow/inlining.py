"""Follows calls into functions of the file, with the values they are given."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Final

from ampaudit.lint.flow.joining import join_values
from ampaudit.lint.flow.machine import OFF, UNSURE, Machine
from ampaudit.lint.flow.script import dotted, has_own_context
from ampaudit.lint.flow.state import State, join
from ampaudit.lint.flow.values import (
    UNKNOWN,
    Autocast,
    Const,
    Context,
    Function,
    FunctionInfo,
    Instance,
    Managed,
    Optimizer,
    Scaler,
    Value,
)

__all__ = ["callback", "enter"]

_DEEPEST: Final = 8  # calls inside calls


def enter(
    machine: Machine,
    info: FunctionInfo,
    node: ast.AST,
    given: Mapping[str, Value],
    owner: Instance | None,
    frame: int,
) -> Value:
    """Follow a call into a function of the file; what it returns."""
    if info in machine.stack or len(machine.stack) >= _DEEPEST:
        return UNKNOWN
    machine.called.add(info)
    saved = (machine.frame, machine.loops, machine.returns, machine.statement, machine.contexts, machine.grad)
    machine.frame, machine.loops, machine.returns = machine.new_frame(), [], []
    machine.contexts, machine.grad = list(machine.contexts), list(machine.grad)
    machine.parents[machine.frame] = frame
    machine.callers_of[machine.frame] = saved[0]
    machine.aliases[machine.frame] = _aliases(info, node, owner)
    machine.stack.append(info)
    entry = machine.live
    _bind(machine, info, given, owner)
    try:
        with machine.guarded("call", node):
            _decorated(machine, info)
            machine.block(info.node.body)
        return _returned(machine, entry)
    finally:
        machine.stack.pop()
        _leave(machine)
        machine.frame, machine.loops, machine.returns, machine.statement, machine.contexts, machine.grad = (
            saved
        )


def _aliases(info: FunctionInfo, node: ast.AST, owner: Instance | None) -> dict[str, str]:
    """Names that are handed over as they are, by the names of the parameters."""
    if not isinstance(node, ast.Call):
        return {}
    arguments = info.node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    names = names[1:] if owner is not None else names
    given = {k.arg: k.value for k in node.keywords if k.arg is not None}
    given |= dict(zip(names, node.args, strict=False))
    return {name: text for name, value in given.items() if (text := dotted(value))}


def _leave(machine: Machine) -> None:
    """Drop the names of the function that returns, unless one that is defined in it may need them."""
    names = machine.live.scopes.get(machine.frame, {}) if machine.state is not None else {}
    if machine.state is not None and not any(isinstance(v, Function) and v.frame for v in names.values()):
        machine.state.leave(machine.frame)


def callback(machine: Machine, function: Function, node: ast.AST) -> None:
    """Follow a function that somebody else will call, some time; what it does changes nothing here."""
    state, contexts, grad = machine.state, machine.contexts, machine.grad
    machine.state = machine.live.anew()
    machine.contexts, machine.grad = [OFF if has_own_context(function.info.node) else UNSURE], []
    enter(machine, function.info, node, {}, None, function.frame)
    machine.state, machine.contexts, machine.grad = state, contexts, grad


def _decorated(machine: Machine, info: FunctionInfo) -> None:
    for decorator in info.node.decorator_list:
        value = machine.evaluate(decorator)
        if isinstance(value, Autocast):
            machine.contexts.append(value)
        elif isinstance(value, Context):
            machine.grad.append(value.kind)


def _bind(machine: Machine, info: FunctionInfo, given: Mapping[str, Value], owner: Instance | None) -> None:
    arguments = info.node.args
    names = [*arguments.posonlyargs, *arguments.args]
    if owner is not None and names:
        machine.live.bind(machine.frame, names[0].arg, owner)
        names = names[1:]
    defaults = dict(zip([a.arg for a in names][::-1], arguments.defaults[::-1], strict=False))
    defaults |= {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d}
    for index, argument in enumerate([*names, *arguments.kwonlyargs]):
        value = given.get(argument.arg, given.get(str(index)))
        if value is None:
            default = defaults.get(argument.arg)
            # a switch may be given either way
            switch = isinstance(default, ast.Constant) and isinstance(default.value, bool)
            value = Const(default.value) if isinstance(default, ast.Constant) and not switch else UNKNOWN
        if argument.annotation is not None and value is UNKNOWN:
            value = _annotated(machine, argument)
        machine.live.bind(machine.frame, argument.arg, value)
    for star in (arguments.vararg, arguments.kwarg):
        if star is not None:
            machine.live.bind(machine.frame, star.arg, UNKNOWN)


def _annotated(machine: Machine, argument: ast.arg) -> Value:
    """What a parameter is annotated as: ``GradScaler``, ``"Optimizer"``, ``Accelerator | None``."""
    written = ast.unparse(argument.annotation) if argument.annotation is not None else ""
    names = set(re.findall(r"\w+", written))
    if "GradScaler" in names:
        return machine.seen_scaler(Scaler(f"name {argument.arg}", text=argument.arg))
    if "Optimizer" in names and not names & {"list", "List", "dict", "Dict", "Sequence", "Iterable", "tuple"}:
        return Optimizer(f"name {argument.arg}")
    return Managed() if names & {"Accelerator", "Fabric", "DeepSpeedEngine"} else UNKNOWN


def _returned(machine: Machine, entry: State) -> Value:
    ends = machine.returns
    if machine.state is not None:
        ends = [*ends, (Const(None), machine.state)]
    if not ends:
        machine.state = entry  # every path raises: go on as if it were not called
        return UNKNOWN
    value, state = ends[0]
    joined: State | None = state
    for other, end in ends[1:]:
        value, joined = join_values(value, other), join(joined, end)
    machine.state = joined
    return value
