"""Evaluates each kind of expression except calls."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ampaudit.linter.flow.calls import evaluate_call
from ampaudit.linter.flow.events import GradientRead, PrecisionChosen, ScaleCompared
from ampaudit.linter.flow.state import choice_of_dtypes, item_of, join, join_values
from ampaudit.linter.flow.syntax import dotted_name
from ampaudit.linter.flow.tensors import combine, matrix_product
from ampaudit.linter.flow.values import (
    MAYBE,
    UNKNOWN,
    UNSCALED_TENSOR,
    BoundMethod,
    DeviceValue,
    DictLiteral,
    DtypeChoice,
    Function,
    GradAttribute,
    ImportedName,
    Instance,
    KnownItems,
    LiteralValue,
    LossGradients,
    Managed,
    Model,
    Parameters,
    Scaler,
    ScaleReading,
    Tensor,
    Truth,
    Value,
    function_of_lambda,
    literal_of,
)

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Handlers, Interpreter

__all__ = ["EXPRESSIONS", "truth_of"]


def _name(interpreter: Interpreter, node: ast.Name) -> Value:
    return interpreter.lookup(node.id)


def _constant(interpreter: Interpreter, node: ast.Constant) -> Value:
    del interpreter
    return LiteralValue(node.value)


def _attribute(interpreter: Interpreter, node: ast.Attribute) -> Value:
    base = interpreter.evaluate(node.value)
    if isinstance(base, ImportedName):
        return interpreter.member(base.path, node.attr)
    if isinstance(base, Instance):
        return _member(interpreter, base, node)
    if isinstance(base, DeviceValue):
        return LiteralValue(base.type) if node.attr == "type" and base.type else UNKNOWN
    if node.attr == "grad":
        # the gradient of a computed tensor may be scaled, and is no gradient of a parameter
        is_computed = isinstance(base, Tensor) and base is not UNSCALED_TENSOR
        return Tensor(scaler_key=MAYBE) if is_computed else GradAttribute()
    if isinstance(base, GradAttribute):
        return base if node.attr == "data" else UNKNOWN
    if isinstance(base, Model):
        if node.attr == "module":
            return base
        if base.instance is not None:
            return _member(interpreter, base.instance, node)
        return interpreter.infer_from_usage(UNKNOWN, dotted_name(node))
    if isinstance(base, Parameters):
        return base if node.attr == "data" else UNKNOWN
    if isinstance(base, Tensor):
        if node.attr in ("data", "T", "mT", "values"):
            return replace(base, is_detached=True) if node.attr == "data" else base
        if node.attr == "dtype" and base.dtype:
            return ImportedName(f"torch.{base.dtype}")
        is_tensor = node.attr not in ("shape", "dtype", "device", "ndim", "requires_grad")
        # a field of what a model returned; the model may have computed it in any dtype
        field = Tensor(
            model_calls=base.model_calls, computed_under=base.computed_under, weights_dtype=base.weights_dtype
        )
        return field if is_tensor else UNKNOWN
    if isinstance(base, Managed):
        return base
    text = dotted_name(node)
    return interpreter.lookup(text, text) if text else UNKNOWN


def _member(interpreter: Interpreter, owner: Instance, node: ast.Attribute) -> Value:
    text = dotted_name(node)
    value = interpreter.state.value(owner.key, node.attr)
    if value is not None:
        return interpreter.infer_from_usage(value, text)
    method = interpreter.bound_method(owner, node.attr)
    return method if method is not None else interpreter.infer_from_usage(UNKNOWN, text)


def _binary(interpreter: Interpreter, node: ast.BinOp) -> Value:
    left, right = interpreter.evaluate(node.left), interpreter.evaluate(node.right)
    for side, value in ((node.left, left), (node.right, right)):
        if isinstance(value, GradAttribute) and not isinstance(node.op, ast.Mult | ast.Div):
            interpreter.record(GradientRead(interpreter.at(side)))
    if isinstance(left, GradAttribute) and isinstance(node.op, ast.Mult | ast.Div):
        unscales = isinstance(right, ScaleReading) or "scale" in ast.unparse(node.right).lower()
        return UNKNOWN if unscales else left
    for reading, factor in ((left, right), (right, left)):
        # a number times the scale, or divided by it
        is_loss = isinstance(factor, LossGradients) or (
            isinstance(factor, Tensor) and factor.node is not None
        )
        if isinstance(reading, ScaleReading) and not is_loss:
            return reading
    interpreter.record_dtypes(node, (left, right))
    if isinstance(node.op, ast.MatMult):
        return matrix_product(interpreter, node, [left, right])
    if isinstance(left, LiteralValue) and isinstance(right, LiteralValue):
        return UNKNOWN
    return combine(node, left, right, interpreter)


def _unary(interpreter: Interpreter, node: ast.UnaryOp) -> Value:
    value = interpreter.evaluate(node.operand)
    return value if isinstance(value, Tensor) and isinstance(node.op, ast.USub) else UNKNOWN


def truth_of(interpreter: Interpreter, node: ast.expr) -> bool | None:
    """Evaluate a condition; return its truth if the script determines it, as in ``False and x``."""
    if isinstance(node, ast.BoolOp):
        truths = [truth_of(interpreter, value) for value in node.values]
        decisive = isinstance(node.op, ast.Or)  # the truth of one operand that decides the whole
        return decisive if decisive in truths else None if None in truths else not decisive
    value = interpreter.evaluate(node)
    if isinstance(value, LiteralValue) and not (value.is_given or isinstance(node, ast.Constant)):
        return None
    return bool(value.value) if isinstance(value, Truth | LiteralValue) else None


def _parts(interpreter: Interpreter, node: ast.BoolOp | ast.Slice | ast.Yield) -> Value:
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.expr):
            interpreter.evaluate(part)
    return UNKNOWN


def _comparison(interpreter: Interpreter, node: ast.Compare) -> Value:
    left, *others = (interpreter.evaluate(value) for value in (node.left, *node.comparators))
    is_none_test = isinstance(node.ops[0], ast.Is | ast.IsNot) and others == [LiteralValue(None)]
    if is_none_test and isinstance(left, LiteralValue) and left.is_given:
        return Truth(isinstance(node.ops[0], ast.Is) == (left.value is None))
    if is_none_test and isinstance(left, Scaler) and left.node is not None and not left.optional:
        return Truth(isinstance(node.ops[0], ast.IsNot))
    if isinstance(left, ScaleReading) and left in others and isinstance(node.ops[0], ast.Eq | ast.NotEq):
        interpreter.record(ScaleCompared(interpreter.at(node)))
    return UNKNOWN


def _conditional(interpreter: Interpreter, node: ast.IfExp) -> Value:
    truth = interpreter.assumed_truth(node.test)
    interpreter.evaluate(node.test)
    if truth is not None:
        return interpreter.evaluate(node.body if truth else node.orelse)
    before = interpreter.state.copy()
    with interpreter.guarded("if", node):
        one = interpreter.evaluate(node.body)
        then, interpreter.path_state = interpreter.path_state, before
        other = interpreter.evaluate(node.orelse)
    interpreter.path_state = join(then, interpreter.path_state)
    if isinstance(one, Function | BoundMethod) and isinstance(other, Function | BoundMethod):
        interpreter.record(PrecisionChosen(interpreter.at(node)))
    return join_values(one, other)


def _lambda(interpreter: Interpreter, node: ast.Lambda) -> Value:
    info = interpreter.lambdas.get(node)
    if info is None:
        info = function_of_lambda(node, bool(_MATTERS_IN_LAMBDA.search(ast.unparse(node.body))))
        interpreter.lambdas[node] = info
    return Function(info, interpreter.frame)


_MATTERS_IN_LAMBDA: Final = re.compile(r"autocast|[Ss]cale|backward|clip|step|half|float16|\.grad\b")


def _sequence(interpreter: Interpreter, node: ast.Tuple | ast.List) -> Value:
    return KnownItems(tuple(interpreter.evaluate(item) for item in node.elts))


def _dictionary(interpreter: Interpreter, node: ast.Dict) -> Value:
    keys = [interpreter.evaluate(key) for key in node.keys]
    names = (literal_of(key) for key in keys)
    texts = tuple(name if isinstance(name, str) else None for name in names)
    return DictLiteral(tuple(interpreter.evaluate(value) for value in node.values), node, texts)


def _comprehension(interpreter: Interpreter, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Value:
    with interpreter.guarded("comprehension", node):
        _generators(interpreter, node.generators)
        item = interpreter.evaluate(node.elt)
        # each item has a graph of its own
        return KnownItems(
            (replace(item, model_calls=None) if isinstance(item, Tensor) else item,), repeated=True
        )


def _dict_comprehension(interpreter: Interpreter, node: ast.DictComp) -> Value:
    with interpreter.guarded("comprehension", node):
        _generators(interpreter, node.generators)
        interpreter.evaluate(node.key)
        return KnownItems((interpreter.evaluate(node.value),), repeated=True)


def _generators(interpreter: Interpreter, generators: list[ast.comprehension]) -> None:
    for generator in generators:
        interpreter.assign_item(generator.target, item_of(interpreter.evaluate(generator.iter)))
        for test in generator.ifs:
            interpreter.evaluate(test)


def _subscript(interpreter: Interpreter, node: ast.Subscript) -> Value:
    base = interpreter.evaluate(node.value)
    key = interpreter.evaluate(node.slice)
    if isinstance(base, KnownItems) and isinstance(node.slice, ast.Constant) and not base.repeated:
        index = node.slice.value
        is_valid = isinstance(index, int) and -len(base.items) <= index < len(base.items)
        return base.items[index] if is_valid else UNKNOWN  # type: ignore[index]
    if isinstance(base, LossGradients | Parameters | Managed | KnownItems):
        return item_of(base)
    if isinstance(base, Tensor):
        return replace(base, upcast=None)
    text = dotted_name(node)
    item = None
    if isinstance(base, DictLiteral) and isinstance(key, LiteralValue):
        item = base.item(key.value)
    elif isinstance(base, DictLiteral) and isinstance(choice := choice_of_dtypes(*base.items), DtypeChoice):
        return choice
    elif isinstance(base, DictLiteral) and isinstance(any_of := item_of(KnownItems(base.items)), Parameters):
        return any_of
    if item is not None:
        return interpreter.infer_from_usage(item, text)
    return interpreter.lookup(text, text) if text else UNKNOWN


def _walrus(interpreter: Interpreter, node: ast.NamedExpr) -> Value:
    value = interpreter.evaluate(node.value)
    interpreter.assign(node.target, value)
    return value


def _operand(interpreter: Interpreter, node: ast.Await | ast.Starred | ast.FormattedValue) -> Value:
    return interpreter.evaluate(node.value)


def _formatted_string(interpreter: Interpreter, node: ast.JoinedStr) -> Value:
    for part in node.values:
        interpreter.evaluate(part)
    start = node.values[0] if node.values else None
    text = start.value if isinstance(start, ast.Constant) else ""
    # a device with some index, as in f"cuda:{rank}"
    return LiteralValue(f"{text}0") if text in ("cuda:", "xpu:", "mps:") else UNKNOWN


EXPRESSIONS: Handlers = {
    ast.Name: _name,
    ast.Constant: _constant,
    ast.Attribute: _attribute,
    ast.Call: evaluate_call,
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.Compare: _comparison,
    ast.BoolOp: _parts,
    ast.IfExp: _conditional,
    ast.Lambda: _lambda,
    ast.Tuple: _sequence,
    ast.List: _sequence,
    ast.Dict: _dictionary,
    ast.ListComp: _comprehension,
    ast.SetComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.DictComp: _dict_comprehension,
    ast.Subscript: _subscript,
    ast.NamedExpr: _walrus,
    ast.Await: _operand,
    ast.Starred: _operand,
    ast.FormattedValue: _operand,
    ast.JoinedStr: _formatted_string,
    ast.Yield: _parts,
    ast.Slice: _parts,
}
