"""Finds the context of a statement: its function, and the tests and scalers around it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import takewhile

from ampaudit.linter.diagnostic import line_of
from ampaudit.linter.flow.script import Script
from ampaudit.linter.flow.syntax import dotted_name, tests_remainder
from ampaudit.linter.source_tree import LinkedScript

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


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
    scalers = {text for text, _ in _scaler_calls(script, node)}
    return scalers.pop() if len(scalers) == 1 else ""


def call_beside_scaler(linked: LinkedScript, node: ast.AST, calls: Sequence[ast.Call]) -> ast.AST:
    """Return the innermost of a node and the calls that lead to it whose function decides the order.

    This is a function that unscales or, if none does, one with a scaler in scope: a helper that clips may be
    right but called in the wrong place. A method has the scalers that other methods of its class use.
    """
    around = [(place, linked.script_of(place)) for place in (node, *reversed(calls))]
    decides = (p for p, script in around if any(c == "unscale_" for _, c in _scaler_calls(script, p)))
    at_hand = (p for p, script in around if _scaler_calls(script, p) or _has_own_scaler(script, p))
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
    """Return the conditions under which a node runs, and what is assigned to names in them."""
    around = linked.script_of(node).around(node)
    return [
        condition
        for part in takewhile(lambda part: not isinstance(part, _FUNCTIONS), around)
        if isinstance(part, ast.If | ast.IfExp)
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


def _scaler_calls(script: Script, node: ast.AST) -> list[tuple[str, str]]:
    """Return scaler and method of the calls of scalers in the function around a node."""
    return [
        (dotted_name(call.func.value), call.func.attr)
        for call in script.nodes(_function_around(script, node))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if call.func.attr in _PROTOCOL and script.usage.is_scaler(dotted_name(call.func.value))
    ]


_PROTOCOL = ("scale", "step", "update", "unscale_")


def _function_around(script: Script, node: ast.AST) -> ast.AST:
    """Return the innermost function around a node, or the module."""
    return next((part for part in script.around(node) if isinstance(part, _FUNCTIONS)), script.tree)


def step_beside(script: Script, node: ast.AST) -> tuple[str, str] | None:
    """Return scaler and optimizer of the only ``x.step(y)`` that runs as often as a node, if there is one."""
    place = _repeated_around(script, node)
    steps = {
        (dotted_name(call.func.value), dotted_name(call.args[0]))
        for call in script.nodes(place)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args
        if call.func.attr == "step" and _repeated_around(script, call) is place
    }
    by_scaler = [step for step in steps if step[1] and script.usage.is_scaler(step[0])]
    return by_scaler[0] if len(by_scaler) == 1 else None


def _repeated_around(script: Script, node: ast.AST) -> ast.AST:
    """Return the innermost function, loop or condition on a count around a node, or the module."""
    for part in script.around(node):
        if isinstance(part, (*_FUNCTIONS, ast.For, ast.AsyncFor, ast.While)):
            return part
        if isinstance(part, ast.If) and tests_remainder(part.test):
            return part
    return script.tree
