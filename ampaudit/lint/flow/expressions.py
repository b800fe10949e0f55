"""What value each kind of expression has; calls are followed by ``lint.calls``."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

from ampaudit.lint.flow.calls import call
from ampaudit.lint.flow.joining import join_values, part_of
from ampaudit.lint.flow.names import canonical
from ampaudit.lint.flow.script import dotted
from ampaudit.lint.flow.tensors import combined, product, touches_gradient
from ampaudit.lint.flow.values import (
    UNKNOWN,
    Const,
    Entries,
    Gradients,
    Instance,
    Listed,
    Managed,
    Model,
    ParamGrad,
    Params,
    Symbol,
    Tensor,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.lint.flow.machine import Handlers, Machine

__all__ = ["EXPRESSIONS"]


def _name(machine: Machine, node: ast.Name) -> Value:
    return machine.lookup(node.id)


def _constant(machine: Machine, node: ast.Constant) -> Value:
    del machine
    return Const(node.value)


def _attribute(machine: Machine, node: ast.Attribute) -> Value:
    base = machine.evaluate(node.value)
    if isinstance(base, Symbol):
        return Symbol(canonical(f"{base.path}.{node.attr}"))
    if isinstance(base, Instance):
        return _member(machine, base, node)
    if node.attr == "grad":
        return ParamGrad()
    if isinstance(base, ParamGrad):
        return base if node.attr == "data" else UNKNOWN
    if isinstance(base, Model):
        return base if node.attr == "module" else machine.by_use(UNKNOWN, dotted(node))
    if isinstance(base, Params):
        return base if node.attr == "data" else UNKNOWN
    if isinstance(base, Tensor):
        if node.attr in ("data", "T", "mT"):
            return base
        known = node.attr not in ("shape", "dtype", "device", "ndim", "requires_grad")
        # a field of what a model returned; the model may have computed it in any dtype
        return Tensor(roots=base.roots, under=base.under) if known else UNKNOWN
    if isinstance(base, Managed):
        return base
    text = dotted(node)
    return machine.lookup(text, text) if text else UNKNOWN


def _member(machine: Machine, owner: Instance, node: ast.Attribute) -> Value:
    text = dotted(node)
    value = machine.live.value(owner.key, node.attr)
    if value is not None:
        return machine.by_use(value, text)
    method = machine.bound(owner, node.attr)
    return method if method is not None else machine.by_use(UNKNOWN, text)


def _binary(machine: Machine, node: ast.BinOp) -> Value:
    left, right = machine.evaluate(node.left), machine.evaluate(node.right)
    for side, value in ((node.left, left), (node.right, right)):
        if isinstance(value, ParamGrad) and not isinstance(node.op, ast.Mult | ast.Div):
            touches_gradient(machine, side)
    if isinstance(left, ParamGrad) and isinstance(node.op, ast.Mult | ast.Div):
        return left
    if isinstance(node.op, ast.MatMult):
        return product(machine, node, [left, right])
    if isinstance(left, Const) and isinstance(right, Const):
        return UNKNOWN
    return combined(node, left, right, machine)


def _unary(machine: Machine, node: ast.UnaryOp) -> Value:
    value = machine.evaluate(node.operand)
    return value if isinstance(value, Tensor) and isinstance(node.op, ast.USub) else UNKNOWN


def _parts(machine: Machine, node: ast.Compare | ast.BoolOp) -> Value:
    values = node.values if isinstance(node, ast.BoolOp) else [node.left, *node.comparators]
    for value in values:
        machine.evaluate(value)
    return UNKNOWN


def _choice(machine: Machine, node: ast.IfExp) -> Value:
    truth = machine.truth(node.test)
    machine.evaluate(node.test)
    if truth is not None:
        return machine.evaluate(node.body if truth else node.orelse)
    with machine.guarded("if", node):
        return join_values(machine.evaluate(node.body), machine.evaluate(node.orelse))


def _listed(machine: Machine, node: ast.Tuple | ast.List) -> Value:
    return Listed(tuple(machine.evaluate(item) for item in node.elts))


def _entries(machine: Machine, node: ast.Dict) -> Value:
    for key in node.keys:
        machine.evaluate(key)
    return Entries(tuple(machine.evaluate(value) for value in node.values), node)


def _comprehension(machine: Machine, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Value:
    with machine.guarded("comprehension", node):
        _generators(machine, node.generators)
        item = machine.evaluate(node.elt)
        # each item has a graph of its own
        return Listed((replace(item, roots=None) if isinstance(item, Tensor) else item,), one=True)


def _dict_comprehension(machine: Machine, node: ast.DictComp) -> Value:
    with machine.guarded("comprehension", node):
        _generators(machine, node.generators)
        machine.evaluate(node.key)
        machine.evaluate(node.value)
    return UNKNOWN


def _generators(machine: Machine, generators: list[ast.comprehension]) -> None:
    for generator in generators:
        machine.assign_item(generator.target, part_of(machine.evaluate(generator.iter)))
        for test in generator.ifs:
            machine.evaluate(test)


def _subscript(machine: Machine, node: ast.Subscript) -> Value:
    base = machine.evaluate(node.value)
    machine.evaluate(node.slice)
    if isinstance(base, Listed) and isinstance(node.slice, ast.Constant) and not base.one:
        index = node.slice.value
        return (
            base.items[index]
            if isinstance(index, int) and -len(base.items) <= index < len(base.items)
            else UNKNOWN
        )
    if isinstance(base, Gradients | Params | Managed | Listed):
        return part_of(base)
    if isinstance(base, Tensor):
        return replace(base, upcast=None)
    text = dotted(node)
    return machine.lookup(text, text) if text else UNKNOWN


def _walrus(machine: Machine, node: ast.NamedExpr) -> Value:
    value = machine.evaluate(node.value)
    machine.assign(node.target, value)
    return value


def _inner(machine: Machine, node: ast.Await | ast.Starred | ast.FormattedValue) -> Value:
    return machine.evaluate(node.value)


def _text(machine: Machine, node: ast.JoinedStr) -> Value:
    for part in node.values:
        machine.evaluate(part)
    return UNKNOWN


def _yield(machine: Machine, node: ast.Yield) -> Value:
    machine.evaluate(node.value)
    return UNKNOWN


def _slice(machine: Machine, node: ast.Slice) -> Value:
    for part in (node.lower, node.upper, node.step):
        machine.evaluate(part)
    return UNKNOWN


EXPRESSIONS: Handlers = {
    ast.Name: _name,
    ast.Constant: _constant,
    ast.Attribute: _attribute,
    ast.Call: call,
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.Compare: _parts,
    ast.BoolOp: _parts,
    ast.IfExp: _choice,
    ast.Tuple: _listed,
    ast.List: _listed,
    ast.Dict: _entries,
    ast.ListComp: _comprehension,
    ast.SetComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.DictComp: _dict_comprehension,
    ast.Subscript: _subscript,
    ast.NamedExpr: _walrus,
    ast.Await: _inner,
    ast.Starred: _inner,
    ast.FormattedValue: _inner,
    ast.JoinedStr: _text,
    ast.Yield: _yield,
    ast.Slice: _slice,
}
