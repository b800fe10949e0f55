"""What each kind of statement does to the state: branches, loops, contexts, definitions."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from ampaudit.lint.diagnostic import Guard
from ampaudit.lint.flow.joining import part_of
from ampaudit.lint.flow.machine import UNSURE, Loop
from ampaudit.lint.flow.names import canonical
from ampaudit.lint.flow.state import State, join
from ampaudit.lint.flow.values import (
    UNKNOWN,
    Autocast,
    ClassValue,
    Const,
    Context,
    Function,
    FunctionInfo,
    Managed,
    Symbol,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.lint.flow.machine import Handlers, Machine

__all__ = ["STATEMENTS"]


def _expression(machine: Machine, node: ast.Expr) -> None:
    value = machine.evaluate(node.value)
    if isinstance(value, Autocast) and value.plain and isinstance(node.value, ast.Call):
        machine.note("autocast.dropped", node.value)


def _assign(machine: Machine, node: ast.Assign) -> None:
    value = machine.evaluate(node.value)
    for target in node.targets:
        if isinstance(target, ast.Subscript):
            machine.evaluate(target.value)
            machine.evaluate(target.slice)
        else:
            machine.assign(target, value)


def _annotated(machine: Machine, node: ast.AnnAssign) -> None:
    if node.value is not None:
        machine.assign(node.target, machine.evaluate(node.value))


def _augmented(machine: Machine, node: ast.AugAssign) -> None:
    combined = ast.BinOp(left=node.target, op=node.op, right=node.value)
    ast.copy_location(combined, node)
    value = machine.evaluate(combined)
    if not isinstance(node.target, ast.Subscript):
        machine.assign(node.target, value)


def _if(machine: Machine, node: ast.If) -> None:
    truth = machine.truth(node.test) if machine.script.is_busy(node) else None
    machine.evaluate(node.test)
    if truth is not None:
        machine.block(node.body if truth else node.orelse)
        return
    before = machine.live.copy()
    with machine.guarded("if", node):
        machine.block(node.body)
    then, machine.state = machine.state, before
    with machine.guarded("if", node):
        machine.block(node.orelse)
    otherwise = machine.state
    machine.state = join(then, otherwise)
    if (then is None) != (otherwise is None):
        # what follows in this block runs only where the branch that goes on was taken
        machine.guards = (*machine.guards, Guard("if", node))


def _repeat(machine: Machine, node: ast.For | ast.AsyncFor | ast.While, item: Value | None) -> None:
    """Twice through the body: what one round leaves behind meets the next."""
    entry = machine.live.copy()
    breaks: list[State] = []
    for again in range(2):
        machine.rounds += again
        before = machine.live.copy()
        if isinstance(node, ast.For | ast.AsyncFor):
            machine.assign_item(node.target, item if item is not None else UNKNOWN)
        else:
            machine.evaluate(node.test)
        loop = Loop()
        machine.loops.append(loop)
        with machine.guarded("loop", node):
            machine.block(node.body)
        machine.loops.pop()
        machine.rounds -= again
        breaks += loop.breaks
        after = machine.state
        for state in loop.continues:
            after = join(after, state)
        machine.state = after
        if after is None or after.same(before):
            break
    for state in breaks:
        machine.state = join(machine.state, state)
    if machine.state is None:  # every path leaves the function; but the loop may not run at all
        machine.state = entry
    machine.block(node.orelse)


def _for(machine: Machine, node: ast.For | ast.AsyncFor) -> None:
    _repeat(machine, node, part_of(machine.evaluate(node.iter)))


def _while(machine: Machine, node: ast.While) -> None:
    _repeat(machine, node, None)


def _with(machine: Machine, node: ast.With | ast.AsyncWith) -> None:
    contexts, grad = len(machine.contexts), len(machine.grad)
    for item in node.items:
        value = machine.evaluate(item.context_expr)
        _enter(machine, value, item.context_expr, node)
        if item.optional_vars is not None:
            machine.assign(item.optional_vars, value if isinstance(value, Managed) else UNKNOWN)
    with machine.guarded("with", node):
        machine.block(node.body)
    del machine.contexts[contexts:]
    del machine.grad[grad:]


def _enter(machine: Machine, value: Value, expression: ast.expr, node: ast.AST) -> None:
    if isinstance(value, Autocast):
        machine.contexts.append(value)
        machine.note("autocast.entered", expression, value=value, block=node)
    elif isinstance(value, Context):
        machine.grad.append(value.kind)
    elif isinstance(value, Symbol) and value.path.split(".")[0] in _HARMLESS:
        return
    else:
        machine.contexts.append(UNSURE)
        machine.grad.append("unsure")


_HARMLESS: Final = frozenset({"builtins", "torch", "tqdm", "contextlib", "time", "warnings", "rich", "os"})


def _try(machine: Machine, node: ast.Try) -> None:
    before = machine.live.copy()
    machine.block(node.body)
    after = machine.state
    if after is not None:
        machine.block(node.orelse)
    ends = [machine.state]
    for handler in node.handlers:
        machine.state = join(before.copy(), after.copy() if after is not None else None)
        if machine.state is None:
            continue
        if handler.name:
            machine.live.bind(machine.frame, handler.name, UNKNOWN)
        with machine.guarded("if", handler):
            machine.block(handler.body)
        ends.append(machine.state)
    joined: State | None = None
    for state in ends:
        joined = join(joined, state)
    machine.state = joined
    if node.finalbody:
        gone = machine.state is None
        machine.state = machine.state if machine.state is not None else before
        machine.block(node.finalbody)
        machine.state = None if gone else machine.state


def _match(machine: Machine, node: ast.Match) -> None:
    machine.evaluate(node.subject)
    before = machine.live
    joined: State | None = before.copy()
    for case in node.cases:
        machine.state = before.copy()
        with machine.guarded("if", case):
            machine.block(case.body)
        joined = join(joined, machine.state)
    machine.state = joined


def _return(machine: Machine, node: ast.Return) -> None:
    value = machine.evaluate(node.value) if node.value is not None else Const(None)
    machine.returns.append((value, machine.live))
    machine.state = None


def _raise(machine: Machine, node: ast.Raise) -> None:
    machine.evaluate(node.exc)
    machine.state = None


def _break(machine: Machine, node: ast.Break) -> None:
    del node
    if machine.loops:
        machine.loops[-1].breaks.append(machine.live)
    machine.state = None


def _continue(machine: Machine, node: ast.Continue) -> None:
    del node
    if machine.loops:
        machine.loops[-1].continues.append(machine.live)
    machine.state = None


def _delete(machine: Machine, node: ast.Delete) -> None:
    for target in node.targets:
        if isinstance(target, ast.Name):
            machine.live.bind(machine.frame, target.id, UNKNOWN)


def _assert(machine: Machine, node: ast.Assert) -> None:
    machine.evaluate(node.test)


def _import(machine: Machine, node: ast.Import) -> None:
    for alias in node.names:
        name, path = alias.asname or alias.name.split(".")[0], alias.name if alias.asname else ""
        machine.live.bind(machine.frame, name, Symbol(canonical(path or name)))


def _import_from(machine: Machine, node: ast.ImportFrom) -> None:
    for alias in node.names:
        path = f"{'.' * node.level}{node.module or ''}.{alias.name}"
        machine.live.bind(machine.frame, alias.asname or alias.name, Symbol(canonical(path)))


def _function(machine: Machine, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    known = machine.script.functions.get(node.name)
    info = known if known is not None and known.node is node else None
    if info is None:
        info = FunctionInfo(node, None, machine.script.is_busy(node))
    machine.live.bind(machine.frame, node.name, Function(info, machine.frame))


def _class(machine: Machine, node: ast.ClassDef) -> None:
    if node.name in machine.script.classes:
        machine.live.bind(machine.frame, node.name, ClassValue(machine.script.classes[node.name]))


STATEMENTS: Handlers = {
    ast.Expr: _expression,
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.If: _if,
    ast.For: _for,
    ast.AsyncFor: _for,
    ast.While: _while,
    ast.With: _with,
    ast.AsyncWith: _with,
    ast.Try: _try,
    ast.TryStar: _try,
    ast.Match: _match,
    ast.Return: _return,
    ast.Raise: _raise,
    ast.Break: _break,
    ast.Continue: _continue,
    ast.Delete: _delete,
    ast.Assert: _assert,
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.FunctionDef: _function,
    ast.AsyncFunctionDef: _function,
    ast.ClassDef: _class,
}
