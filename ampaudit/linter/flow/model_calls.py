"""Interprets calls of models: under which context, with what, and what they return."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ampaudit.linter.diagnostic import file_number, key_of
from ampaudit.linter.flow.definitions import FunctionInfo, Instance
from ampaudit.linter.flow.devices import applies_to_device
from ampaudit.linter.flow.events import HalfUnderAutocast, ModelCall
from ampaudit.linter.flow.facts import BFLOAT16_WEIGHTS, FREED, HALF_WEIGHTS
from ampaudit.linter.flow.half_ops import check_rounded_timesteps, check_same_dtype
from ampaudit.linter.flow.inlining import inline_call
from ampaudit.linter.flow.joining import flattened
from ampaudit.linter.flow.syntax import dotted_name, keyword_value
from ampaudit.linter.flow.tensors import autocast_dtype
from ampaudit.linter.flow.torch_names import LAYERS_WITHOUT_DTYPE, MATRIX_LAYERS
from ampaudit.linter.flow.values import KnownItems, Model, Tensor, Value

if TYPE_CHECKING:
    from ampaudit.linter.flow.arguments import Arguments
    from ampaudit.linter.flow.interpreter import Interpreter


__all__ = ["call_model", "guessed_model", "method_of"]


def call_model(
    interpreter: Interpreter, node: ast.Call, model: Model, arguments: Arguments, method: str = "forward"
) -> Value:
    """Interpret a forward pass, or another method, under the current autocast context."""
    cast = autocast_dtype(interpreter) if applies_to_device(interpreter, node, model) else ""
    root = f"{model.key} at {key_of(node)}{interpreter.call_path}"
    tensors = [value for value in flattened(arguments.all()) if isinstance(value, Tensor)]
    is_unsure = any(tensor.model_calls is None and tensor.node is not None for tensor in tensors)
    model_calls = None if is_unsure else frozenset({root}).union(*(t.model_calls or () for t in tensors))
    interpreter.state.set_fact(FREED, None, root)
    called = not isinstance(node.func, ast.Attribute) or node.func.attr in ("forward", "__call__", "module")
    called = called or interpreter.script.usage.is_model(dotted_name(node.func))
    for value in arguments.all() if model.instance is None else ():
        check_rounded_timesteps(interpreter, value)
    _check_input(interpreter, node, model, arguments)
    modes = tuple(interpreter.grad_modes)
    interpreter.record(ModelCall(interpreter.at(node), model, interpreter.autocast, modes, called))
    halved = interpreter.state.trained_cast(HALF_WEIGHTS, model.key)
    if cast and halved is not None and not _has_own_switch(interpreter):
        interpreter.record(HalfUnderAutocast(interpreter.at(halved)))
    if model.instance is None and model.key.startswith("name "):
        model = guessed_model(interpreter, node, model, arguments, method)
    info = method_of(model, method)
    if info is not None and (info.relevant or not file_number(info.node)):
        outer = interpreter.weights[-1:] or [""]
        interpreter.weights.append(_weights_dtype(interpreter, model) or outer[0])
        # an input that is cast to float32 need not be a request for products in float32
        given_here = {
            k: replace(v, upcast=None) if isinstance(v, Tensor) else v for k, v in arguments.named().items()
        }
        returned = inline_call(interpreter, info, node, given_here, model.instance)
        interpreter.weights.pop()
        return _from_model(returned, cast, model_calls, node)
    return Tensor(
        dtype=cast if _ends_in_product(model, arguments) or _is_known_network(interpreter, model) else "",
        weights_dtype=_weights_dtype(interpreter, model),
        computed_under=cast,
        model_calls=model_calls,
        node=node,
    )


def guessed_model(
    interpreter: Interpreter, node: ast.Call, model: Model, arguments: Arguments, method: str
) -> Model:
    """Return a model that is created elsewhere as an instance of the only model class of the file."""
    root = interpreter.script.root_module
    forward = None if root is None else root.method(method)
    if root is None or forward is None or len(arguments.all()) > len(forward.node.args.args) - 1:
        return model
    interpreter.guesses = True
    guessed, start = Instance(f"class {root.node.name}", root), root.method("__init__")
    if start is not None and guessed.key not in interpreter.state.scopes:
        inline_call(interpreter, start, node, {}, guessed)
    return replace(model, instance=guessed)


def _is_known_network(interpreter: Interpreter, model: Model) -> bool:
    """Return whether a model is of a package whose networks end in a matrix product or a convolution."""
    is_known = model.origin.startswith(_NETWORKS)
    interpreter.guesses = interpreter.guesses or is_known
    return is_known


_NETWORKS: Final = ("segmentation_models_pytorch.", "timm.create_model", "monai.networks.nets.")


def _check_input(interpreter: Interpreter, node: ast.Call, model: Model, arguments: Arguments) -> None:
    """Check that a layer whose weights are float32 is not given what autocast has cast, outside of it."""
    has_dtype = isinstance(model.node, ast.Call) and any(k.arg == "dtype" for k in model.node.keywords)
    is_plain = bool(model.layers) and model.layers[0] in MATRIX_LAYERS and not has_dtype
    state = interpreter.state
    is_cast = state.may_hold(HALF_WEIGHTS, model.key) or state.may_hold(BFLOAT16_WEIGHTS, model.key)
    first = arguments.first
    by_autocast = isinstance(first, Tensor) and first.computed_under != ""
    if interpreter.autocast.enabled is False and is_plain and not is_cast and by_autocast:
        check_same_dtype(interpreter, node, "this layer", [first, Tensor(dtype="float32")])


def _weights_dtype(interpreter: Interpreter, model: Model) -> str:
    """Return the 16-bit dtype in which a model computes by its weights, outside autocast."""
    if interpreter.autocast.enabled is True:
        return ""
    cast = interpreter.state.weights_cast(model.key)
    return "" if cast is None else cast[0]


def _has_own_switch(interpreter: Interpreter) -> bool:
    """Return whether a condition other than the assumed one enables autocast."""
    call = interpreter.autocast.node
    if not interpreter.assumptions or not interpreter.autocast.conditional or not isinstance(call, ast.Call):
        return False
    enabled = keyword_value(call, "enabled")
    return enabled is None or ast.unparse(enabled) not in interpreter.assumptions


def _from_model(returned: Value, cast: str, model_calls: frozenset[str] | None, node: ast.Call) -> Value:
    """Return what a followed method returned, as the result of a call of the model."""
    if isinstance(returned, KnownItems):
        items = tuple(_from_model(item, cast, model_calls, node) for item in returned.items)
        return replace(returned, items=items)
    if not isinstance(returned, Tensor):
        return Tensor(computed_under=cast, model_calls=model_calls, node=node)
    return replace(
        returned,
        computed_under=cast or returned.computed_under,
        model_calls=model_calls,
        node=node,
        weights_dtype="",
    )


def _ends_in_product(model: Model, arguments: Arguments) -> bool:
    """Return whether the output certainly has autocast's dtype, as that of a linear layer has."""
    for layer in reversed(model.layers):
        if layer in MATRIX_LAYERS:
            return True
        if layer not in LAYERS_WITHOUT_DTYPE:
            return False
    first = arguments.first
    return bool(model.layers) and isinstance(first, Tensor) and bool(first.cast)


def method_of(model: Model, name: str) -> FunctionInfo | None:
    """Return a method of the class of a model, if that is known."""
    return None if model.instance is None else model.instance.info.method(name)
