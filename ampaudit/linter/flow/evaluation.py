"""Executes each kind of statement, and evaluates each kind of expression except calls."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Final

from ampaudit.core.text import is_number
from ampaudit.linter.flow import events
from ampaudit.linter.flow.calls import evaluate_call
from ampaudit.linter.flow.inlining import inline_call
from ampaudit.linter.flow.interpreter import UNKNOWN_AUTOCAST, Handlers, Interpreter, ProgramPoint
from ampaudit.linter.flow.objects import cast_weights, freeze, mixes
from ampaudit.linter.flow.state import State, choice_of_dtypes, item_of, join, join_all, join_values
from ampaudit.linter.flow.syntax import dotted_name, last_component, mentions, module_of, resets_count
from ampaudit.linter.flow.tensors import call_op, combine, matrix_product
from ampaudit.linter.flow.torch_names import canonical_name
from ampaudit.linter.flow.values import (
    MAYBE,
    NUMBER,
    UNKNOWN,
    UNSCALED_TENSOR,
    Autocast,
    Class,
    ContextManager,
    DeviceValue,
    DictLiteral,
    DtypeChoice,
    Function,
    FunctionInfo,
    GradAttribute,
    ImportedName,
    Instance,
    KnownItems,
    LiteralValue,
    LossGradients,
    Managed,
    Model,
    Optimizer,
    Parameters,
    Remainder,
    Scaler,
    ScaleReading,
    Tensor,
    Value,
    literal_of,
)


def _repeat(
    interpreter: Interpreter, node: ast.For | ast.AsyncFor | ast.While, item: Value = UNKNOWN
) -> None:
    """Execute the body twice, so that the state after one iteration meets the next."""
    entry = interpreter.state.copy()
    breaks: list[State] = []
    for is_first in (True, False):
        before = interpreter.state.copy()
        point = interpreter.point
        with interpreter.entered(point if is_first else point._replace(is_first_iteration=False)):
            if isinstance(node, ast.For | ast.AsyncFor):
                interpreter.assign_item(node.target, item)
            else:
                interpreter.evaluate(node.test)
            breaks += _execute_body(interpreter, node, interpreter.point.inside("loop", node))
        after = interpreter.path_state
        if after is None or after == before:
            break
    interpreter.path_state = join_all([interpreter.path_state, *breaks])
    if interpreter.path_state is None:  # every path leaves the function; but the loop may not run at all
        interpreter.path_state = entry
    interpreter.execute(node.orelse)


def _execute_body(
    interpreter: Interpreter, node: ast.For | ast.AsyncFor | ast.While, point: ProgramPoint
) -> list[State]:
    """Execute the body of a loop once, and return the states in which it leaves the loop."""
    inside = point._replace(breaks=[], continues=[])
    with interpreter.entered(inside):
        interpreter.execute(node.body)
    interpreter.path_state = join_all([interpreter.path_state, *inside.continues])
    return inside.breaks


def _for(interpreter: Interpreter, node: ast.For | ast.AsyncFor) -> None:
    """Execute the body once for each item, if these are a few objects that are known."""
    items = interpreter.evaluate(node.iter)
    objects = items.items if isinstance(items, KnownItems) and not items.repeated else ()
    are_known = all(isinstance(item, Optimizer | Model | Scaler | Instance) for item in objects)
    if node.orelse or not are_known or not 0 < len(objects) <= _MAX_UNROLLED:
        _repeat(interpreter, node, item_of(items))
        return
    breaks: list[State] = []
    for item in objects:
        if interpreter.path_state is None:
            break
        interpreter.assign(node.target, item)
        breaks += _execute_body(interpreter, node, interpreter.point)
    interpreter.path_state = join_all([interpreter.path_state, *breaks])


_MAX_UNROLLED: Final = 4


def _leave_iteration(interpreter: Interpreter, node: ast.Break | ast.Continue) -> None:
    point = interpreter.point
    (point.breaks if isinstance(node, ast.Break) else point.continues).append(interpreter.state)
    interpreter.path_state = None


def _assign(interpreter: Interpreter, node: ast.Assign) -> None:
    value = interpreter.evaluate(node.value)
    for target in node.targets:
        if mixes(target, node.value):
            average = interpreter.evaluate(target)
            if isinstance(average, Parameters):
                interpreter.record(events.WeightsAveraged, node, average)
        interpreter.assign(target, value)
        if isinstance(target, ast.Subscript):
            _assign_item(interpreter, node, target, value)
        elif isinstance(target, ast.Attribute):
            _assign_attribute(interpreter, node, target, value)


def _assign_item(interpreter: Interpreter, node: ast.Assign, target: ast.Subscript, value: Value) -> None:
    owner = interpreter.evaluate(target.value)
    if isinstance(owner, Tensor):
        interpreter.record_dtypes(node, [owner])
        interpreter.record_number(node.value, value)
    if _selects_by_tensor(interpreter, target.slice):
        call_op(interpreter, target, "torch.Tensor.__setitem__", [owner, value])


def _assign_attribute(
    interpreter: Interpreter, node: ast.Assign, target: ast.Attribute, value: Value
) -> None:
    if target.attr in ("requires_grad", "data"):
        owner = interpreter.evaluate(target.value)
        for model in (owner.models or ()) if isinstance(owner, Parameters) else ():
            if target.attr == "requires_grad":
                freeze(interpreter, model, value)
            elif isinstance(value, Parameters) and value.dtype:
                cast_weights(interpreter, model, value.dtype, node)
    if target.attr == "grad" and not (isinstance(value, LiteralValue) and value.value is None):
        interpreter.record(events.UnknownEffect, target)
        interpreter.state.assume_any_step()  # the new gradient may be of any scale


def _selects_by_tensor(interpreter: Interpreter, index: ast.expr) -> bool:
    """Return whether an index has a tensor, such as a mask; slices and numbers copy, and convert."""
    if isinstance(index, ast.Tuple):
        return any(_selects_by_tensor(interpreter, part) for part in index.elts)
    if isinstance(index, ast.Call | ast.Name):
        value = interpreter.evaluate(index)
        return isinstance(value, Tensor) and value.dtype != "number"
    is_inverse = isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.Invert)
    return is_inverse or isinstance(index, ast.Compare)


def _annotated(interpreter: Interpreter, node: ast.AnnAssign) -> None:
    if node.value is not None:
        interpreter.assign(node.target, interpreter.evaluate(node.value))


def _augmented(interpreter: Interpreter, node: ast.AugAssign) -> None:
    combined = ast.BinOp(left=node.target, op=node.op, right=node.value)
    ast.copy_location(combined, node)
    value = interpreter.evaluate(combined)
    weights = interpreter.evaluate(node.target)
    if isinstance(weights, Parameters):
        if isinstance(node.op, ast.Add) and weights.decayed:
            interpreter.record(events.WeightsAveraged, node, weights)
        target = node.target
        owner = target.value if isinstance(target, ast.Attribute) and target.attr == "data" else target
        interpreter.assign(owner, replace(weights, decayed=isinstance(node.op, ast.Mult)))
    elif not isinstance(node.target, ast.Subscript):
        interpreter.assign(node.target, value)


def _if(interpreter: Interpreter, node: ast.If) -> None:
    is_relevant = interpreter.point.script.is_relevant(node) or bool(interpreter.assumptions)
    truth = interpreter.assumed_truth(node.test) if is_relevant else None
    decided = _truth(interpreter, node.test)
    truth = truth if decided is None else decided
    if truth is not None:
        interpreter.execute(node.body if truth else node.orelse)
        return
    if resets_count(node):
        interpreter.tests_of_counts.add(node.test)
    before = interpreter.state.copy()
    with interpreter.entered(interpreter.point.inside("if", node)):
        interpreter.execute(node.body)
    then, interpreter.path_state = interpreter.path_state, before
    with interpreter.entered(interpreter.point.inside("if", node)):
        interpreter.execute(node.orelse)
    otherwise = interpreter.path_state
    interpreter.path_state = join(then, otherwise)
    if (then is None) != (otherwise is None):
        # what follows in this block runs only where the branch that continues was taken
        interpreter.point = interpreter.point.inside("if", node)


def _with(interpreter: Interpreter, node: ast.With | ast.AsyncWith) -> None:
    with interpreter.entered(interpreter.point):
        for item in node.items:
            value = interpreter.evaluate(item.context_expr)
            is_harmless = isinstance(value, ImportedName) and value.path.split(".")[0] in _HARMLESS
            if not interpreter.enter(value) and not is_harmless:
                interpreter.enter(UNKNOWN_AUTOCAST)
                interpreter.enter(ContextManager("unsure"))
            if isinstance(value, Autocast):
                interpreter.record(events.AutocastEntered, item.context_expr, value, node)
            if item.optional_vars is not None:
                interpreter.assign(item.optional_vars, value if isinstance(value, Managed) else UNKNOWN)
        calls = (item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call))
        expects_error = any(last_component(dotted_name(call.func)).startswith(_RAISES) for call in calls)
        muted = interpreter.point.muted or expects_error
        interpreter.point = interpreter.point.inside("with", node)._replace(muted=muted)
        interpreter.execute(node.body)


_RAISES = ("raises", "assertRaises")  # of a test


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
        if handler.name:
            interpreter.state.bind(interpreter.point.frame, handler.name, UNKNOWN)
        with interpreter.entered(interpreter.point.inside("if", handler)):
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
        with interpreter.entered(interpreter.point.inside("if", case)):
            interpreter.execute(case.body)
        ends.append(interpreter.path_state)
    interpreter.path_state = join_all(ends)


def _return(interpreter: Interpreter, node: ast.Return) -> None:
    value = interpreter.evaluate(node.value) if node.value is not None else LiteralValue(None)
    interpreter.point.returns.append((value, interpreter.state))
    interpreter.path_state = None


def _raise(interpreter: Interpreter, node: ast.Raise) -> None:
    interpreter.evaluate(node.exc)
    interpreter.path_state = None


def _delete(interpreter: Interpreter, node: ast.Delete) -> None:
    for target in node.targets:
        if isinstance(target, ast.Name):
            interpreter.state.bind(interpreter.point.frame, target.id, UNKNOWN)


def _import(interpreter: Interpreter, node: ast.Import) -> None:
    for alias in node.names:
        name, path = alias.asname or alias.name.split(".")[0], alias.name if alias.asname else ""
        interpreter.state.bind(interpreter.point.frame, name, ImportedName(canonical_name(path or name)))


def _import_from(interpreter: Interpreter, node: ast.ImportFrom) -> None:
    module = module_of(node)
    for alias in node.names:
        if alias.name == "*":
            _import_all(interpreter, module)
        else:
            value = interpreter.member(module, alias.name)
            interpreter.state.bind(interpreter.point.frame, alias.asname or alias.name, value)


def _import_all(interpreter: Interpreter, module: str) -> None:
    script = interpreter.linked.module(interpreter.point.script, module)
    if script is not None:
        names = {*script.functions, *script.classes, *interpreter.state.scopes.get(-script.number, ())}
        for name in sorted(name for name in names if not name.startswith("_")):
            interpreter.state.bind(interpreter.point.frame, name, interpreter.member(module, name))


def _function(interpreter: Interpreter, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    info = interpreter.point.script.functions.get(node.name)
    if info is None or info.node is not node:
        info = FunctionInfo(node, interpreter.point.script.is_relevant(node))
    interpreter.state.bind(interpreter.point.frame, node.name, Function(info, interpreter.point.frame))


def _class(interpreter: Interpreter, node: ast.ClassDef) -> None:
    info = interpreter.point.script.classes.get(node.name)
    if info is not None:
        values = map(interpreter.evaluate, node.bases if info.base is None else ())
        bases = (value.info for value in values if isinstance(value, Class))
        info.base = next((base for base in bases if info not in base.ancestry), info.base)
        interpreter.state.bind(interpreter.point.frame, node.name, Class(info))


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
            return base._replace(is_detached=True) if node.attr == "data" else base
        if node.attr == "dtype" and base.dtype:
            return ImportedName(f"torch.{base.dtype}")
        if node.attr == "shape":
            return KnownItems((NUMBER,), repeated=True)
        is_tensor = node.attr not in ("dtype", "device", "ndim", "requires_grad")
        # a field of what a model returned; the model may have computed it in any dtype, as it does a loss
        dtype = base.weights_dtype if node.attr != "loss" else ""
        if node.attr == "logits":  # of a layer that autocast computes in 16 bits
            dtype = dtype or base.computed_under
        field = Tensor(model_calls=base.model_calls, computed_under=base.computed_under, weights_dtype=dtype)
        return field if is_tensor else UNKNOWN
    if isinstance(base, Managed):
        return base
    text = dotted_name(node)
    if isinstance(base, DictLiteral) and (item := base.item(node.attr)) is not None:
        return interpreter.infer_from_usage(item, text)
    return interpreter.lookup(text) if text else UNKNOWN


def _member(interpreter: Interpreter, owner: Instance, node: ast.Attribute) -> Value:
    text = dotted_name(node)
    value = interpreter.state.value(owner.key, node.attr)
    if interpreter.point.weights and isinstance(value, Tensor):
        value = value._replace(dtype="")  # what is registered was cast with the model
    if value is not None:
        return interpreter.infer_from_usage(value, text)
    method = owner.info.method(node.attr)
    if method is None and node.attr == "accelerator" and owner.info.derives("Trainer", "Seq2SeqTrainer"):
        trainers = (one for one in interpreter.managers if one.framework and "Trainer" in one.framework.bases)
        return max(trainers, key=lambda one: one.scales, default=UNKNOWN)
    if method is None:
        return interpreter.infer_from_usage(_class_attribute(interpreter, owner, node.attr), text)
    if not method.is_property:
        return Function(method, owner=owner)
    returned = inline_call(interpreter, method, node, {}, owner) if method.relevant else UNKNOWN
    return interpreter.infer_from_usage(returned, text)


def _class_attribute(interpreter: Interpreter, owner: Instance, name: str) -> Value:
    """Return a setting in the body of a class: a literal, or a dtype by its name."""
    node = owner.info.attribute(name)
    if not isinstance(node, ast.Constant | ast.Name | ast.Attribute):
        return UNKNOWN
    script = interpreter.linked.script_of(owner.info.node)
    with interpreter.entered(interpreter.point._replace(script=script, frame=-script.number)):
        value = interpreter.evaluate(node)
    return value if isinstance(value, LiteralValue | ImportedName) else UNKNOWN


def _binary(interpreter: Interpreter, node: ast.BinOp) -> Value:
    left, right = interpreter.evaluate(node.left), interpreter.evaluate(node.right)
    for side, value in ((node.left, left), (node.right, right)):
        if isinstance(value, LiteralValue):
            interpreter.record_number(side, value)
        elif isinstance(value, GradAttribute) and not isinstance(node.op, ast.Mult | ast.Div | ast.Mod):
            interpreter.record(events.GradientRead, side)
    if isinstance(left, GradAttribute) and isinstance(node.op, ast.Mult | ast.Div):
        unscales = isinstance(right, ScaleReading) or mentions(node.right, "scale")
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
    is_computed = isinstance(left, Tensor) and left is not UNSCALED_TENSOR
    if isinstance(node.op, ast.Mod) and not (is_computed or isinstance(literal_of(left), str)):
        return Remainder()
    return combine(node, left, right, interpreter)


def _unary(interpreter: Interpreter, node: ast.UnaryOp) -> Value:
    value = interpreter.evaluate(node.operand)
    number, is_minus = literal_of(value), isinstance(node.op, ast.USub)
    if is_minus and is_number(number):
        return LiteralValue(-number)
    is_same = isinstance(value, Remainder) or (is_minus and isinstance(value, Tensor))
    return value if is_same else UNKNOWN


def _truth(interpreter: Interpreter, node: ast.expr) -> bool | None:
    """Evaluate a condition; return its truth if the script determines it, as in ``False and x``."""
    if isinstance(node, ast.BoolOp):
        truths = [_truth(interpreter, value) for value in node.values]
        decisive = isinstance(node.op, ast.Or)  # the truth of one operand that decides the whole
        return decisive if decisive in truths else None if None in truths else not decisive
    value = interpreter.evaluate(node)
    if isinstance(value, Remainder):
        interpreter.tests_of_counts.add(node)
    if isinstance(value, Scaler) and interpreter.state.holds_scaler(value):
        return True
    if isinstance(value, LiteralValue) and not (value.is_given or isinstance(node, ast.Constant)):
        return None
    return bool(value.value) if isinstance(value, LiteralValue) else None


def _parts(interpreter: Interpreter, node: ast.BoolOp | ast.Slice) -> Value:
    parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
    values = list(map(interpreter.evaluate, parts))
    return next((value for value in values if isinstance(value, Remainder)), UNKNOWN)


def _yield(interpreter: Interpreter, node: ast.Yield) -> Value:
    interpreter.point.yields.append(interpreter.point)
    return interpreter.evaluate(node.value)


def _comparison(interpreter: Interpreter, node: ast.Compare) -> Value:
    left, *others = (interpreter.evaluate(value) for value in (node.left, *node.comparators))
    is_none_test = isinstance(node.ops[0], ast.Is | ast.IsNot) and others == [LiteralValue(None)]
    if is_none_test and isinstance(left, LiteralValue) and left.is_given:
        return LiteralValue(isinstance(node.ops[0], ast.Is) == (left.value is None), is_given=True)
    if is_none_test and isinstance(left, Scaler) and interpreter.state.holds_scaler(left):
        return LiteralValue(isinstance(node.ops[0], ast.IsNot), is_given=True)
    if isinstance(left, ScaleReading) and left in others and isinstance(node.ops[0], ast.Eq | ast.NotEq):
        interpreter.record(events.ScaleCompared, node)
    operands = (left, *others)
    if any(isinstance(value, Remainder) for value in operands):
        return Remainder()
    is_mask = not any(isinstance(value, LiteralValue) for value in operands)
    is_mask = is_mask or any(isinstance(value, Tensor) and value.node is not None for value in operands)
    return Tensor(dtype="integer", node=node) if is_mask else UNKNOWN


def _conditional(interpreter: Interpreter, node: ast.IfExp) -> Value:
    truth = interpreter.assumed_truth(node.test)
    interpreter.evaluate(node.test)
    if truth is not None:
        return interpreter.evaluate(node.body if truth else node.orelse)
    before = interpreter.state.copy()
    with interpreter.entered(interpreter.point.inside("if", node)):
        one = interpreter.evaluate(node.body)
        then, interpreter.path_state = interpreter.path_state, before
        other = interpreter.evaluate(node.orelse)
    interpreter.path_state = join(then, interpreter.path_state)
    if isinstance(one, Function) and isinstance(other, Function):
        interpreter.record(events.PrecisionChosen, node)
    return join_values(one, other)


def _lambda(interpreter: Interpreter, node: ast.Lambda) -> Value:
    info = interpreter.lambdas.get(node)
    if info is None:
        returned = ast.copy_location(ast.Return(value=node.body), node.body)
        function = ast.FunctionDef(name="<lambda>", args=node.args, body=[returned], decorator_list=[])
        ast.copy_location(function, node)
        info = FunctionInfo(function, interpreter.point.script.is_relevant(node))
        interpreter.lambdas[node] = info
    return Function(info, interpreter.point.frame)


def _sequence(interpreter: Interpreter, node: ast.Tuple | ast.List) -> Value:
    return KnownItems(tuple(interpreter.evaluate(item) for item in node.elts))


def _dictionary(interpreter: Interpreter, node: ast.Dict) -> Value:
    keys = [interpreter.evaluate(key) for key in node.keys]
    names = (literal_of(key) for key in keys)
    texts = tuple(name if isinstance(name, str) else None for name in names)
    return DictLiteral(tuple(interpreter.evaluate(value) for value in node.values), node, texts)


def _comprehension(
    interpreter: Interpreter, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
) -> Value:
    with interpreter.entered(interpreter.point.inside("comprehension", node)):
        for generator in node.generators:
            interpreter.assign_item(generator.target, item_of(interpreter.evaluate(generator.iter)))
            for test in generator.ifs:
                interpreter.evaluate(test)
        if isinstance(node, ast.DictComp):
            interpreter.evaluate(node.key)
            item = interpreter.evaluate(node.value)
        else:
            item = interpreter.evaluate(node.elt)
            if isinstance(item, Tensor):
                item = item._replace(model_calls=None)  # each has a graph of its own
        return KnownItems((item,), repeated=True)


def _subscript(interpreter: Interpreter, node: ast.Subscript) -> Value:
    base = interpreter.evaluate(node.value)
    key = interpreter.evaluate(node.slice)
    if isinstance(base, KnownItems) and isinstance(node.slice, ast.Constant) and not base.repeated:
        index = node.slice.value
        if isinstance(index, int) and -len(base.items) <= index < len(base.items):
            return base.items[index]
        return UNKNOWN
    if isinstance(base, LossGradients | Parameters | KnownItems):
        return item_of(base)
    if isinstance(base, Managed):
        return base
    if isinstance(base, Tensor):
        return base._replace(upcast=False)
    text = dotted_name(node)
    item = None
    if isinstance(base, DictLiteral) and isinstance(key, LiteralValue):
        item = base.item(key.value)
    elif isinstance(base, DictLiteral) and isinstance(choice := choice_of_dtypes(*base.items), DtypeChoice):
        return choice
    if item is not None:
        return interpreter.infer_from_usage(item, text)
    return interpreter.lookup(text) if text else UNKNOWN


def _walrus(interpreter: Interpreter, node: ast.NamedExpr) -> Value:
    value = interpreter.evaluate(node.value)
    interpreter.assign(node.target, value)
    return value


def _operand(interpreter: Interpreter, node: ast.Expr | ast.Await | ast.Starred) -> Value:
    return interpreter.evaluate(node.value)


def _formatted_string(interpreter: Interpreter, node: ast.JoinedStr) -> Value:
    for part in node.values:
        value = interpreter.evaluate(part)
        if isinstance(value, Tensor):
            interpreter.record(events.NumberRead, part, value)
    start = node.values[0] if node.values else None
    text = start.value if isinstance(start, ast.Constant) else ""
    # a device with some index, as in f"cuda:{rank}"
    return LiteralValue(f"{text}0") if text in ("cuda:", "xpu:", "mps:") else UNKNOWN


HANDLERS: Handlers = {
    ast.Expr: _operand,
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
    ast.Assert: lambda interpreter, node: interpreter.evaluate(node.test),
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.FunctionDef: _function,
    ast.AsyncFunctionDef: _function,
    ast.ClassDef: _class,
    ast.Constant: lambda _, node: LiteralValue(node.value),
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
    ast.DictComp: _comprehension,
    ast.Subscript: _subscript,
    ast.NamedExpr: _walrus,
    ast.Await: _operand,
    ast.Starred: _operand,
    ast.FormattedValue: _operand,
    ast.JoinedStr: _formatted_string,
    ast.Yield: _yield,
    ast.Slice: _parts,
}
