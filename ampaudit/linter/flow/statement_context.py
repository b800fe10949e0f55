"""Finds the context of a statement: its function, the tests and scalers around it, what follows."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from itertools import takewhile

from ampaudit.linter.diagnostic import line_of
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.syntax import dotted_name, nested_blocks, tests_remainder
from ampaudit.linter.source_tree import LinkedScript

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def in_same_function(linked: LinkedScript, one: ast.AST, other: ast.AST) -> bool:
    """Return whether two nodes are in the same function, where a name means the same."""
    return _function_around(linked.script_of(one), one) is _function_around(linked.script_of(other), other)


def is_in_scope(linked: LinkedScript, assigned: ast.AST, node: ast.AST) -> bool:
    """Return whether a variable is in scope at a node: one of a function around it, or of its module."""
    return _function_around(linked.script_of(assigned), assigned) in linked.script_of(node).around(node)


def nodes_around(linked: LinkedScript, node: ast.AST) -> list[ast.AST]:
    """Return the nodes of the function around a node."""
    script = linked.script_of(node)
    return script.nodes(_function_around(script, node))


def scaler_in_scope(script: Script, node: ast.AST) -> str:
    """Return the name of the only scaler in the function around a node; empty if there is not exactly one."""
    scalers = _scalers_in_scope(script, node)
    return scalers[0] if len(scalers) == 1 else ""


def call_beside_scaler(linked: LinkedScript, node: ast.AST, calls: Sequence[ast.Call]) -> ast.AST:
    """Return the innermost of a node and the calls that lead to it whose function decides the order.

    This is a function that unscales or, if none does, one with a scaler in scope: a helper that clips may be
    right but called in the wrong place. A method has the scalers that other methods of its class use.
    """
    around = [(place, linked.script_of(place)) for place in (node, *reversed(calls))]
    decides = (p for p, script in around if any(c == "unscale_" for _, c in _scaler_calls(script, p)))
    at_hand = (p for p, script in around if _scalers_in_scope(script, p) or _has_own_scaler(script, p))
    return next(decides, None) or next(at_hand, node)


def _has_own_scaler(script: Script, node: ast.AST) -> bool:
    """Return whether the class around a node has a scaler in an attribute."""
    classes = [part for part in script.around(node) if isinstance(part, ast.ClassDef)]
    return any(
        isinstance(part, ast.Attribute) and name.startswith("self.") and script.usage.is_scaler(name)
        for around in classes
        for part in script.nodes(around)
        if (name := dotted_name(part))
    )


def location_suffix(node: ast.AST, place: ast.AST, otherwise: str = "") -> str:
    """Return the line of a node in words, if its diagnostic is at a call that leads to it."""
    here = f" {otherwise}" if otherwise else ""
    return here if place is node else f" at line {line_of(node)}"


def conditions_around(linked: LinkedScript, node: ast.AST) -> list[ast.expr]:
    """Return the conditions of the ``if`` statements around a node, and what is assigned to names in them."""
    around = linked.script_of(node).around(node)
    return [
        condition
        for part in takewhile(lambda part: not isinstance(part, _FUNCTIONS), around)
        if isinstance(part, ast.If)
        for condition in (part.test, *assigned_values(linked, node, part.test))
    ]


def assigned_values(linked: LinkedScript, node: ast.AST, condition: ast.expr) -> list[ast.expr]:
    """Return what the function around a node assigns to the names in a condition."""
    names = {n.id for n in ast.walk(condition) if isinstance(n, ast.Name)}
    return [
        n.value
        for n in nodes_around(linked, node)
        if isinstance(n, ast.Assign) and any(isinstance(t, ast.Name) and t.id in names for t in n.targets)
    ]


def _scalers_in_scope(script: Script, node: ast.AST) -> list[str]:
    texts = {text for text, _ in _scaler_calls(script, node)}
    return [text for text in texts if script.usage.is_scaler(text)]


def _scaler_calls(script: Script, node: ast.AST) -> list[tuple[str, str]]:
    """Return object and method of calls in the function around a node that may be those of a scaler."""
    return [
        (dotted_name(call.func.value), call.func.attr)
        for call in script.nodes(_function_around(script, node))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _PROTOCOL
    ]


_PROTOCOL = ("scale", "step", "update", "unscale_")


def _function_around(script: Script, node: ast.AST) -> ast.AST:
    """Return the innermost function around a node, or the module."""
    return next((part for part in script.around(node) if isinstance(part, _FUNCTIONS)), script.tree)


def following_step(script: Script, statement: ast.stmt | None) -> tuple[str, str] | None:
    """Return scaler and optimizer of the ``x.step(y)`` that follows a statement in the same iteration."""
    for follower in _following_statements(script, statement):
        for call in _unconditional_calls(follower):
            if isinstance(call.func, ast.Attribute) and call.func.attr == "step" and call.args:
                scaler, optimizer = dotted_name(call.func.value), dotted_name(call.args[0])
                if optimizer and script.usage.is_scaler(scaler):
                    return scaler, optimizer
    return None


def _following_statements(script: Script, statement: ast.stmt | None) -> list[ast.stmt]:
    """Return what follows a statement in its block, then in the blocks around it, up to a loop."""
    following: list[ast.stmt] = []
    inner: ast.AST | None = statement
    for around in script.around(statement) if statement is not None else ():
        for block in nested_blocks(around):
            for index, item in enumerate(block):
                if item is inner:
                    following += block[index + 1 :]
        if isinstance(around, _DEFINITIONS + _LOOPS):
            break
        inner = around
    return following


def _unconditional_calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """Yield calls that run once per statement: not in loops, definitions, or conditions on a count."""
    if isinstance(statement, _DEFINITIONS + _LOOPS):
        return
    if isinstance(statement, ast.If) and tests_remainder(statement.test):
        return
    blocks = nested_blocks(statement)
    if not blocks:
        yield from (node for node in ast.walk(statement) if isinstance(node, ast.Call))
    for block in blocks:
        for inner in block:
            yield from _unconditional_calls(inner)
