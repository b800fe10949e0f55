"""Executes each kind of statement: branches, loops, contexts, definitions."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final

from ampaudit.linter.flow.events import AutocastEntered, Guard
from ampaudit.linter.flow.expressions import truth_of
from ampaudit.linter.flow.gradients import replace_gradients
from ampaudit.linter.flow.interpreter import UNKNOWN_AUTOCAST
from ampaudit.linter.flow.state import LoopExits, State, item_of, join, join_all
from ampaudit.linter.flow.syntax import dotted_name, module_of
from ampaudit.linter.flow.tensors import call_op
from ampaudit.linter.flow.torch_names import canonical_name
from ampaudit.linter.flow.values import (
    UNKNOWN,
    Autocast,
    Class,
    ContextManager,
    Function,
    FunctionInfo,
    ImportedName,
    Instance,
    KnownItems,
    LiteralValue,
    Managed,
    Model,
    Optimizer,
    Parameters,
    Scaler,
    Tensor,
    Value,
)
from ampaudit.linter.flow.weight_copies import freeze

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Handlers, Interpreter

__all__ = ["STATEMENTS"]


def _repeat(
    interpreter: Interpreter, node: ast.For | ast.AsyncFor | ast.While, item: Value = UNKNOWN
) -> None:
    """Execute the body twice, so that the state after one iteration meets the next."""
    entry = interpreter.state.copy()
    breaks: list[State] = []
    for again in range(2):
        interpreter.repetitions += again
        before = interpreter.state.copy()
        if isinstance(node, ast.For | ast.AsyncFor):
            interpreter.assign_item(node.target, item)
        else:
            interpreter.evaluate(node.test)
        with interpreter.guarded("loop", node):
            breaks += _execute_body(interpreter, node)
        interpreter.repetitions -= again
        after = interpreter.path_state
        if after is None or after == before:
            break
    interpreter.path_state = join_all([interpreter.path_state, *breaks])
    if interpreter.path_state is None:  # every path leaves the function; but the loop may not run at all
        interpreter.path_state = entry
    interpreter.execute(node.orelse)


def _execute_body(interpreter: Interpreter, node: ast.For | ast.AsyncFor | ast.While) -> list[State]:
    """Execute the body of a loop once, and return the states in which it leaves the loop."""
    exits = LoopExits()
    interpreter.loops.append(exits)
    interpreter.execute(node.body)
    interpreter.loops.pop()
    interpreter.path_state = join_all([interpreter.path_state, *exits.continues])
    return exits.breaks


def _for(interpreter: Interpreter, node: ast.For | ast.AsyncFor) -> None:
    items = interpreter.evaluate(node.iter)
    if isinstance(items, KnownItems) and not items.repeated and _are_objects(items) and not node.orelse:
        _unroll(interpreter, node, items)
    else:
        _repeat(interpreter, node, item_of(items))


def _are_objects(items: KnownItems) -> bool:
    """Return whether some items are a few objects, each of which is known."""
    kinds = (Optimizer, Model, Scaler, Instance)
    return 0 < len(items.items) <= _MAX_UNROLLED and all(isinstance(item, kinds) for item in items.items)


_MAX_UNROLLED: Final = 4


def _unroll(interpreter: Interpreter, node: ast.For | ast.AsyncFor, items: KnownItems) -> None:
    """Execute the body once for each item."""
    breaks: list[State] = []
    for item in items.items:
        if interpreter.path_state is None:
            break
        interpreter.assign(node.target, item)
        breaks += _execute_body(interpreter, node)
    interpreter.path_state = join_all([interpreter.path_state, *breaks])


def _leave_iteration(interpreter: Interpreter, node: ast.Break | ast.Continue) -> None:
    if interpreter.loops:
        exits = interpreter.loops[-1]
        (exits.breaks if isinstance(node, ast.Break) else exits.continues).append(interpreter.state)
    interpreter.path_state = None


def _expression(interpreter: Interpreter, node: ast.Expr) -> None:
    interpreter.evaluate(node.value)


def _assign(interpreter: Interpreter, node: ast.Assign) -> None:
    value = interpreter.evaluate(node.value)
    for target in node.targets:
        interpreter.assign(target, value)
        if isinstance(target, ast.Subscript) and _selects_by_tensor(interpreter, target.slice):
            owner = interpreter.evaluate(target.value)
            call_op(interpreter, target, "torch.Tensor.__setitem__", [owner, value])
        if isinstance(target, ast.Attribute) and target.attr == "requires_grad":
            owner = interpreter.evaluate(target.value)
            for model in (owner.models or ()) if isinstance(owner, Parameters) else ():
                freeze(interpreter, model, value)
        replaces = isinstance(target, ast.Attribute) and target.attr == "grad"
        if replaces and not (isinstance(value, LiteralValue) and value.value is None):
            replace_gradients(interpreter, target)


def _selects_by_tensor(interpreter: Interpreter, index: ast.expr) -> bool:
    """Return whether an index is a tensor, such as a mask; slices and numbers copy, and convert."""
    return isinstance(index, ast.Call | ast.Compare | ast.Name) and (
        isinstance(index, ast.Compare) or isinstance(interpreter.evaluate(index), Tensor)
    )


def _annotated(interpreter: Interpreter, node: ast.AnnAssign) -> None:
    if node.value is not None:
        interpreter.assign(node.target, interpreter.evaluate(node.value))


def _augmented(interpreter: Interpreter, node: ast.AugAssign) -> None:
    combined = ast.BinOp(left=node.target, op=node.op, right=node.value)
    ast.copy_location(combined, node)
    value = interpreter.evaluate(combined)
    if not isinstance(node.target, ast.Subscript):
        interpreter.assign(node.target, value)


def _if(interpreter: Interpreter, node: ast.If) -> None:
    is_relevant = interpreter.script.is_relevant(node) or bool(interpreter.assumptions)
    truth = interpreter.assumed_truth(node.test) if is_relevant else None
    decided = truth_of(interpreter, node.test)
    truth = truth if decided is None else decided
    if truth is not None:
        interpreter.execute(node.body if truth else node.orelse)
        return
    before = interpreter.state.copy()
    with interpreter.guarded("if", node):
        interpreter.execute(node.body)
    then, interpreter.path_state = interpreter.path_state, before
    with interpreter.guarded("if", node):
        interpreter.execute(node.orelse)
    otherwise = interpreter.path_state
    interpreter.path_state = join(then, otherwise)
    if (then is None) != (otherwise is None):
        # what follows in this block runs only where the branch that continues was taken
        interpreter.guards = (*interpreter.guards, Guard("if", node))


def _with(interpreter: Interpreter, node: ast.With | ast.AsyncWith) -> None:
    autocasts, grad_modes = len(interpreter.autocasts), len(interpreter.grad_modes)
    for item in node.items:
        value = interpreter.evaluate(item.context_expr)
        _enter(interpreter, value, item.context_expr, node)
        if item.optional_vars is not None:
            interpreter.assign(item.optional_vars, value if isinstance(value, Managed) else UNKNOWN)
    muted, interpreter.muted = interpreter.muted, interpreter.muted or _expects_error(node)
    with interpreter.guarded("with", node):
        interpreter.execute(node.body)
    interpreter.muted = muted
    del interpreter.autocasts[autocasts:]
    del interpreter.grad_modes[grad_modes:]


def _expects_error(node: ast.With | ast.AsyncWith) -> bool:
    """Return whether a test expects that the block raises."""
    calls = (item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call))
    return any(dotted_name(call.func).rpartition(".")[2].startswith(_RAISES) for call in calls)


_RAISES = ("raises", "assertRaises")


def _enter(interpreter: Interpreter, value: Value, expression: ast.expr, node: ast.AST) -> None:
    if isinstance(value, Autocast):
        interpreter.autocasts.append(value)
        interpreter.record(AutocastEntered(interpreter.at(expression), value, node))
    elif isinstance(value, ContextManager):
        interpreter.grad_modes.append(value.kind)
    elif isinstance(value, ImportedName) and value.path.split(".")[0] in _HARMLESS:
        return
    else:
        interpreter.autocasts.append(UNKNOWN_AUTOCAST)
        interpreter.grad_modes.append("unsure")


_HARMLESS: Final = frozenset({"builtins", "torch", "tqdm", "contextlib", "time", "warnings", "rich", "os"})


def _try(interpreter: Interpreter, node: ast.Try) -> None:
    before = interpreter.state.copy()
    interpreter.execute(node.body)
    after = interpreter.path_state
    if after is not None:
        interpreter.execute(node.orelse)
    ends = [interpreter.path_state]
    for handler in node.handlers:
        interpreter.path_state = join(before.copy(), after.copy() if after is not None else None)
        if interpreter.path_state is None:
            continue
        if handler.name:
            interpreter.state.bind(interpreter.frame, handler.name, UNKNOWN)
        with interpreter.guarded("if", handler):
            interpreter.execute(handler.body)
        ends.append(interpreter.path_state)
    interpreter.path_state = join_all(ends)
    if node.finalbody:
        has_left = interpreter.path_state is None
        interpreter.path_state = interpreter.path_state or before
        interpreter.execute(node.finalbody)
        interpreter.path_state = None if has_left else interpreter.path_state


def _match(interpreter: Interpreter, node: ast.Match) -> None:
    interpreter.evaluate(node.subject)
    before = interpreter.state
    ends: list[State | None] = [before.copy()]
    for case in node.cases:
        interpreter.path_state = before.copy()
        with interpreter.guarded("if", case):
            interpreter.execute(case.body)
        ends.append(interpreter.path_state)
    interpreter.path_state = join_all(ends)


def _return(interpreter: Interpreter, node: ast.Return) -> None:
    value = interpreter.evaluate(node.value) if node.value is not None else LiteralValue(None)
    interpreter.returns.append((value, interpreter.state))
    interpreter.path_state = None


def _raise(interpreter: Interpreter, node: ast.Raise) -> None:
    interpreter.evaluate(node.exc)
    interpreter.path_state = None


def _delete(interpreter: Interpreter, node: ast.Delete) -> None:
    for target in node.targets:
        if isinstance(target, ast.Name):
            interpreter.state.bind(interpreter.frame, target.id, UNKNOWN)


def _assert(interpreter: Interpreter, node: ast.Assert) -> None:
    interpreter.evaluate(node.test)


def _import(interpreter: Interpreter, node: ast.Import) -> None:
    for alias in node.names:
        name, path = alias.asname or alias.name.split(".")[0], alias.name if alias.asname else ""
        interpreter.state.bind(interpreter.frame, name, ImportedName(canonical_name(path or name)))


def _import_from(interpreter: Interpreter, node: ast.ImportFrom) -> None:
    module = module_of(node)
    for alias in node.names:
        if alias.name == "*":
            _import_all(interpreter, module)
        else:
            value = interpreter.member(module, alias.name)
            interpreter.state.bind(interpreter.frame, alias.asname or alias.name, value)


def _import_all(interpreter: Interpreter, module: str) -> None:
    script = interpreter.linked.module(interpreter.script, module)
    if script is not None:
        names = {*script.functions, *script.classes, *interpreter.state.scopes.get(-script.number, ())}
        for name in sorted(name for name in names if not name.startswith("_")):
            interpreter.state.bind(interpreter.frame, name, interpreter.member(module, name))


def _function(interpreter: Interpreter, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    info = interpreter.script.functions.get(node.name)
    if info is None or info.node is not node:
        info = FunctionInfo(node, None, interpreter.script.is_relevant(node))
    interpreter.state.bind(interpreter.frame, node.name, Function(info, interpreter.frame))


def _class(interpreter: Interpreter, node: ast.ClassDef) -> None:
    if node.name in interpreter.script.classes:
        interpreter.state.bind(interpreter.frame, node.name, Class(interpreter.script.classes[node.name]))


STATEMENTS: Handlers = {
    ast.Expr: _expression,
    ast.Assign: _assign,
    ast.AnnAssign: _annotated,
    ast.AugAssign: _augmented,
    ast.If: _if,
    ast.For: _for,
    ast.AsyncFor: _for,
    ast.While: _repeat,
    ast.With: _with,
    ast.AsyncWith: _with,
    ast.Try: _try,
    ast.TryStar: _try,
    ast.Match: _match,
    ast.Return: _return,
    ast.Raise: _raise,
    ast.Break: _leave_iteration,
    ast.Continue: _leave_iteration,
    ast.Delete: _delete,
    ast.Assert: _assert,
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.FunctionDef: _function,
    ast.AsyncFunctionDef: _function,
    ast.ClassDef: _class,
}
