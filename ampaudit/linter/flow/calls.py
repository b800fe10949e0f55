"""Interprets calls: of methods, of functions of torch or of the file, and of unknown code."""

from __future__ import annotations

import ast

from ampaudit.linter.diagnostic import file_number
from ampaudit.linter.flow import objects, optimizers, tensors, torch_calls
from ampaudit.linter.flow.gradients import gradient_method, scaler_method, use_loss_gradients
from ampaudit.linter.flow.inlining import inline_call
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.managed import make_trainer, managed_method
from ampaudit.linter.flow.objects import call_model
from ampaudit.linter.flow.optimizers import copies_method
from ampaudit.linter.flow.state import choice_of_dtypes, join_items
from ampaudit.linter.flow.syntax import dotted_name
from ampaudit.linter.flow.torch_calls import assume_any_effect, call_loss_function, unknown_call
from ampaudit.linter.flow.torch_names import HARMLESS_METHODS
from ampaudit.linter.flow.values import (
    MAYBE,
    UNKNOWN,
    UNSCALED_TENSOR,
    Arguments,
    BoundMethod,
    Class,
    DictLiteral,
    Function,
    FunctionInfo,
    GradAttribute,
    ImportedName,
    Instance,
    KnownItems,
    LiteralValue,
    LossFunction,
    LossGradients,
    Managed,
    Model,
    Optimizer,
    Parameters,
    Partial,
    Scaler,
    Scheduler,
    StateDict,
    Tensor,
    Value,
)

__all__ = [
    "evaluate_call",
]


def _arguments(interpreter: Interpreter, node: ast.Call) -> Arguments:
    positional = [interpreter.evaluate(argument) for argument in node.args]
    keywords = {k.arg or "**": interpreter.evaluate(k.value) for k in node.keywords}
    entries = keywords.get("**")
    if isinstance(entries, DictLiteral):
        keywords |= {n: v for n, v in zip(entries.names, entries.items, strict=True) if n is not None}
    return Arguments(positional, keywords, node)


def evaluate_call(interpreter: Interpreter, node: ast.Call) -> Value:
    """Apply the effects of a call to the state and return its value."""
    if isinstance(node.func, ast.Attribute):
        base = interpreter.evaluate(node.func.value)
        if not isinstance(base, ImportedName):
            return _method(interpreter, node, base, node.func.attr)
        function = interpreter.member(base.path, node.func.attr)
    else:
        function = interpreter.evaluate(node.func)
    return _function(interpreter, node, function)


def _method(interpreter: Interpreter, node: ast.Call, base: Value, name: str) -> Value:
    if isinstance(base, Instance):
        return _instance_method(interpreter, node, base, name)
    if isinstance(base, Tensor) and base is UNSCALED_TENSOR and isinstance(node.func, ast.Attribute):
        base = interpreter.infer_from_usage(base, dotted_name(node.func.value))
    arguments = _arguments(interpreter, node)
    if isinstance(base, Scaler):
        return scaler_method(interpreter, node, base, name, arguments)
    if isinstance(base, Optimizer):
        return optimizers.optimizer_method(interpreter, node, base, name, arguments)
    if isinstance(base, Model):
        return objects.model_method(interpreter, node, base, name, arguments)
    if isinstance(base, Scheduler):
        return UNKNOWN
    if isinstance(base, StateDict):  # a copy, or a part of it
        return base
    if isinstance(base, LossGradients):
        return use_loss_gradients(interpreter, node, base, name)
    if isinstance(base, GradAttribute):
        return gradient_method(interpreter, node, name)
    if isinstance(base, Tensor):
        return tensors.tensor_method(interpreter, node, base, name, arguments)
    if name in ("parameters", "named_parameters") and not isinstance(base, Managed | DictLiteral):
        return Parameters(None)
    casts = name in ("to", "type") and any(tensors.dtype_named(value) for value in arguments.all())
    if base is UNKNOWN and (casts or name in tensors.ON_ANY_TENSOR):
        return tensors.tensor_method(interpreter, node, Tensor(scaler_key=MAYBE), name, arguments)
    if isinstance(base, Managed):
        return managed_method(interpreter, node, base, name, arguments)
    if isinstance(base, DictLiteral) and name == "values":
        return KnownItems(base.items)
    if isinstance(base, DictLiteral) and name == "get":
        return choice_of_dtypes(*base.items, *arguments.positional[1:])
    if isinstance(base, DictLiteral) and name == "items":
        return KnownItems(
            tuple(KnownItems((LiteralValue(k), v)) for k, v in zip(base.names, base.items, strict=True))
        )
    if isinstance(base, Parameters):
        return copies_method(interpreter, node, base, name, arguments)
    if isinstance(base, KnownItems) and name == "append" and isinstance(node.func, ast.Attribute):
        added = join_items(base, arguments.get(0, "object") or UNKNOWN)
        if dotted_name(node.func.value):
            interpreter.assign(node.func.value, added)
        return UNKNOWN
    if isinstance(base, LossFunction | KnownItems):
        return base if name in ("to", "cuda", "cpu", "values", "items") else UNKNOWN
    return unknown_call(interpreter, node, name, arguments)


def _instance_method(interpreter: Interpreter, node: ast.Call, base: Instance, name: str) -> Value:
    method = interpreter.bound_method(base, name)
    if method is not None:
        return _function(interpreter, node, method)
    stored = interpreter.state.value(base.key, name)
    value = interpreter.infer_from_usage(stored or UNKNOWN, dotted_name(node.func))
    if stored is not None or value is not UNKNOWN:
        return _function(interpreter, node, value)
    arguments = _arguments(interpreter, node)
    if name not in HARMLESS_METHODS and not (base.info.derives("Module") and name in objects.MODULE_METHODS):
        assume_any_effect(interpreter, f"self.{name}", [*arguments.all(), base])
    return UNKNOWN


def _function(interpreter: Interpreter, node: ast.Call, function: Value) -> Value:
    arguments = _arguments(interpreter, node)
    if isinstance(function, Partial):
        arguments = _completed(interpreter, function, arguments)
        node, function = arguments.node, function.function
    make_trainer(interpreter, node, arguments)
    if isinstance(function, Function | BoundMethod):
        info = function.info
        if not _is_followed(interpreter, info, arguments):
            return UNSCALED_TENSOR
        frame = function.frame if isinstance(function, Function) else None
        owner = function.owner if isinstance(function, BoundMethod) and not info.is_static else None
        return inline_call(interpreter, info, node, arguments.named(), owner, frame)
    if isinstance(function, Class):
        return objects.make_instance(interpreter, node, function.info, arguments)
    if isinstance(function, ImportedName):
        return torch_calls.call_imported(interpreter, node, function.path, arguments)
    if isinstance(function, Model):
        return call_model(interpreter, node, function, arguments)
    if isinstance(function, LossFunction):
        return call_loss_function(interpreter, node, function, arguments)
    if isinstance(function, Managed):
        tensors.call_op(interpreter, node, "torch.nn.Module", arguments.all())
        return Tensor(model_calls=None, node=node)
    if isinstance(function, Instance):
        methods = (interpreter.bound_method(function, name) for name in ("__call__", "forward"))
        method = next(filter(None, methods), None)
        return UNKNOWN if method is None else _function(interpreter, node, method)
    return unknown_call(interpreter, node, dotted_name(node.func), arguments)


def _completed(interpreter: Interpreter, partial: Partial, completion: Arguments) -> Arguments:
    """Return the arguments of a partial together with those of a call that completes them."""
    creation, node = partial.node, completion.node
    keywords = [*(k for k in creation.keywords if k.arg not in completion.keywords), *node.keywords]
    whole = ast.Call(func=creation.args[0], args=[*creation.args[1:], *node.args], keywords=keywords)
    # one node for each pair, as events are told apart by their nodes
    whole = interpreter.completed_calls.setdefault((creation, node), ast.copy_location(whole, node))
    interpreter.script.parents.setdefault(whole, node)
    positional = [*partial.positional, *completion.positional]
    return Arguments(positional, {**dict(partial.keywords), **completion.keywords}, whole)


def _is_followed(interpreter: Interpreter, info: FunctionInfo, arguments: Arguments) -> bool:
    """Return whether a function is worth following; ops in this file may have a 16-bit dtype."""
    is_16_bit = interpreter.autocast.enabled is True or any(
        isinstance(value, Tensor) and value.cast for value in arguments.all()
    )
    return info.relevant or (is_16_bit and not file_number(info.node))
