"""Interprets models, optimizers, the weights that both have, and instances of the file's classes."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Final

from ampaudit.linter.diagnostic import file_number, key_of
from ampaudit.linter.flow import events
from ampaudit.linter.flow.gradients import unknown_backward, zero_gradients
from ampaudit.linter.flow.inlining import bind_fields, inline_call
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.state import (
    BFLOAT16_WEIGHTS,
    CAST_BY_DTYPE,
    DEVICE,
    FROZEN,
    HALF_WEIGHTS,
    HALVED_IN_LOOP,
    PERHAPS,
    UNKNOWN_GRADIENTS,
    AccumulatedGradients,
    PerhapsHalf,
    Phase,
    flattened,
    item_of,
)
from ampaudit.linter.flow.syntax import walk
from ampaudit.linter.flow.tensors import (
    autocast_dtype,
    call_op,
    dtype_named,
    follows_operands,
    requested_dtype,
)
from ampaudit.linter.flow.torch_names import LAYERS_WITHOUT_DTYPE, MATRIX_LAYERS, NETWORKS
from ampaudit.linter.flow.values import (
    UNKNOWN,
    Call,
    ClassInfo,
    ContextManager,
    DeviceValue,
    DictLiteral,
    DtypeChoice,
    FunctionInfo,
    Instance,
    KnownItems,
    Model,
    Optimizer,
    Parameters,
    StateDict,
    Tensor,
    Value,
    device_of,
    literal_of,
)

MODULE_METHODS: Final = frozenset(
    "train eval to cuda cpu half float parameters named_parameters modules children state_dict"
    " load_state_dict register_buffer register_parameter zero_grad apply requires_grad_ log log_dict".split()
)
_WITHOUT_FORWARD: Final = MODULE_METHODS | frozenset(
    "named_modules named_children get_parameter buffers named_buffers compile share_memory"
    " gradient_checkpointing_enable enable_input_require_grads save_pretrained push_to_hub"
    " print_trainable_parameters set_epoch init_weights freeze unfreeze add_module load_adapter".split()
)
WITH_ADAPTERS: Final = "peft.get_peft_model"
_TRAINS: Final = re.compile(r"backward|train_|_step$|optimi[sz]e_|learn")


def make_model(interpreter: Interpreter, call: Call, origin: str) -> Model:
    """Create a model that is constructed or loaded here."""
    modules = [v for v in flattened(call.positional) if isinstance(v, Model)]
    is_followed = origin == "torch.nn.Sequential" and any(module.instance for module in modules)
    model = Model(
        key_of(call.node) + interpreter.call_path,
        call.node,
        origin=origin,
        layers=_layers(origin, call),
        modules=tuple(modules) if is_followed else (),
    )
    is_quantized = "quantization_config" in call.keywords  # which is trained through adapters
    for name in () if is_quantized else ("dtype", "torch_dtype"):
        value = call.keywords.get(name, UNKNOWN)
        dtype = dtype_named(value) or literal_of(value)  # transformers takes its name as well
        if isinstance(dtype, str) and dtype in CAST_BY_DTYPE:
            interpreter.state.set_fact(CAST_BY_DTYPE[dtype], call.node, model.key)
    return model


def _layers(origin: str, call: Call) -> tuple[str, ...]:
    name = origin.rpartition(".")[2]
    if not origin.startswith("torch.nn."):
        return ()
    if name != "Sequential":
        return (name,)
    parts = [value.layers if isinstance(value, Model) else ("",) for value in call.positional]
    return tuple(layer for part in parts for layer in (part or ("",)))


def model_method(interpreter: Interpreter, call: Call, model: Model, name: str) -> Value:
    """Interpret a method of a model."""
    state = interpreter.state
    if name in ("half", "float", "bfloat16", "double", "to", "type"):
        _cast(interpreter, call, model, name)
        for value in call.all():
            device = device_of(value)
            if device:
                state.set_fact(DEVICE, device, model.key)
            elif value is UNKNOWN or isinstance(value, DeviceValue):
                state.set_fact(DEVICE, PERHAPS, model.key)
        return model
    if name in ("cuda", "cpu"):
        state.set_fact(DEVICE, name, model.key)
        return model
    if name in ("parameters", "named_parameters", "state_dict"):
        return Parameters(frozenset({model.key}))
    if name == "update_parameters":
        interpreter.record(events.WeightsAveraged, call.node, Parameters(frozenset({model.key})))
        return UNKNOWN
    if name == "zero_grad":
        zero_gradients(interpreter, call.node)
        return UNKNOWN
    if name in ("clip_grad_norm_", "clip_grad_value_"):
        interpreter.record(events.Clip, call.node, name, call)
        return UNKNOWN
    if name == "no_sync":
        return ContextManager("no_sync")
    if name == "requires_grad_":
        freeze(interpreter, model.key, call.get(0, "requires_grad"))
    if name in ("train", "eval", "requires_grad_", "apply"):
        return model
    if name == "add_adapter" and state.known_at(HALF_WEIGHTS, model.key) is not None:
        freeze(interpreter, model.key, None)  # diffusers and transformers cast adapters to the weights' dtype
    if model.instance is None and model.key.startswith("name ") and name not in _WITHOUT_FORWARD:
        model = guessed_model(interpreter, call, model, name)
    if _TRAINS.search(name) and method_of(model, name) is None:
        unknown_backward(interpreter)
        return UNKNOWN
    if name in _WITHOUT_FORWARD or "optim" in name:
        return UNKNOWN
    method = "forward" if name in ("forward", "__call__") else name
    returned = call_model(interpreter, call, model, method)
    if method == "forward" or not isinstance(returned, Tensor) or method_of(model, method) is not None:
        return returned
    return Tensor(computed_under=returned.computed_under)  # what it returns may be of several graphs


def _cast(interpreter: Interpreter, call: Call, model: Model, name: str) -> None:
    dtype = requested_dtype(name, call)
    if dtype == "float16":
        interpreter.record(events.PrecisionChosen, call.node)
    if dtype:
        in_loop = any(guard.kind == "loop" for guard in interpreter.point.guards)
        halved = interpreter.state.known_at(HALVED_IN_LOOP, model.key)
        if dtype == "float32" and halved is not None:
            interpreter.record(events.WeightsRounded, call.node, model.key, halved)
        halved = call.node if dtype == "float16" and in_loop else None
        interpreter.state.set_fact(HALVED_IN_LOOP, halved, model.key)
        cast_weights(interpreter, model.key, dtype, call.node)
        if model.origin == WITH_ADAPTERS:  # casts what is trained as well
            interpreter.state.set_fact(FROZEN, None, model.key)
    elif any(isinstance(value, DtypeChoice) and "float16" in value.names for value in call.all()):
        interpreter.state.set_fact(HALF_WEIGHTS, PerhapsHalf(call.node), model.key)
    elif (
        any(value is UNKNOWN or isinstance(value, DtypeChoice) for value in call.all())
        and interpreter.state.get(HALF_WEIGHTS, model.key) is not None
    ):
        interpreter.state.set_fact(HALF_WEIGHTS, PERHAPS, model.key)
        interpreter.state.set_fact(BFLOAT16_WEIGHTS, None, model.key)


def cast_weights(interpreter: Interpreter, model: str, dtype: str, node: ast.AST) -> None:
    """Record that the weights of a model are cast to a dtype."""
    for name, kind in CAST_BY_DTYPE.items():
        interpreter.state.set_fact(kind, node if dtype == name else None, model)


def copy_model(interpreter: Interpreter, node: ast.Call, model: Model) -> Model:
    """Return a copy of a model, whose weights have the same dtype and device."""
    copied = replace(model, key=key_of(node), node=node)
    for kind in (*CAST_BY_DTYPE.values(), DEVICE):
        interpreter.state.set_fact(kind, interpreter.state.get(kind, model.key), copied.key)
    return copied


def with_adapters(interpreter: Interpreter, node: ast.Call, model: Model) -> Model:
    """Return a model with float32 adapters, which freeze its weights; it computes in their dtype."""
    adapted = replace(copy_model(interpreter, node, model), origin=WITH_ADAPTERS)
    interpreter.state.set_fact(FROZEN, True, adapted.key)
    return adapted


def make_instance(interpreter: Interpreter, call: Call, info: ClassInfo) -> Value:
    """Create an instance of a class of the file."""
    if info.derives("Optimizer"):
        return UNKNOWN
    instance = Instance(f"{info.node.name} {key_of(call.node)}{interpreter.call_path}", info)
    start, half = info.method("__init__"), None
    if start is not None and info.is_relevant and interpreter.budget.allows(start.node):
        half, interpreter.half_parameter = interpreter.half_parameter, None
        inline_call(interpreter, start, call.node, call.named(), instance)
        half, interpreter.half_parameter = interpreter.half_parameter, half
    elif start is None:
        bind_fields(interpreter, instance, call)
    if info.is_module:
        model = make_model(interpreter, call, info.node.name)
        if half is not None:
            interpreter.state.set_fact(HALF_WEIGHTS, half, model.key)
        return replace(model, instance=instance)
    return instance


def call_model(interpreter: Interpreter, call: Call, model: Model, method: str = "forward") -> Value:
    """Interpret a forward pass, or another method, under the current autocast context."""
    cast = autocast_dtype(interpreter) if applies_to_device(interpreter, model) else ""
    root = f"{model.key} at {key_of(call.node)}{interpreter.call_path}"
    tensors = [value for value in flattened(call.all()) if isinstance(value, Tensor)]
    is_unsure = any(tensor.model_calls is None and tensor.node is not None for tensor in tensors)
    model_calls = None if is_unsure else frozenset({root}).union(*(t.model_calls or () for t in tensors))
    if model.instance is None:
        call_op(interpreter, call.node, "torch.nn.Module", call.all())
    weights_dtype = _weights_dtype(interpreter, model)
    if model.layers and model.layers[0] in MATRIX_LAYERS:
        has_dtype = isinstance(model.node, ast.Call) and any(k.arg == "dtype" for k in model.node.keywords)
        is_cast = any(interpreter.state.get(kind, model.key) is not None for kind in CAST_BY_DTYPE.values())
        known = weights_dtype if is_cast or has_dtype else "" if interpreter.point.weights else "float32"
        check_input(interpreter, call, model.layers[0], known)
    elif model.origin.startswith(NETWORKS):
        check_input(interpreter, call, "Model", weights_dtype)
    place = interpreter.point
    interpreter.record(events.ModelCall, call.node, model, place.grad_modes)
    if model.instance is None and model.key.startswith("name "):
        model = guessed_model(interpreter, call, model, method)
    weights = weights_dtype or place.weights
    value: Value = call.first
    if model.modules:
        with interpreter.entered(place._replace(weights=weights)):
            for module in model.modules:
                value = call_model(interpreter, Call([value], {}, call.node), module)
        return value
    info = method_of(model, method)
    is_followed = info is not None and (info.relevant or not file_number(info.node))
    if info is not None and is_followed and interpreter.budget.allows(info.node):
        # an input that is cast to float32 need not be a request for products in float32
        given_here = {
            k: v._replace(upcast=False) if isinstance(v, Tensor) else v for k, v in call.named().items()
        }
        with interpreter.entered(place._replace(weights=weights)):
            returned = inline_call(interpreter, info, call.node, given_here, model.instance)
        return _from_model(returned, cast, model_calls, call.node)
    return Tensor(
        dtype=_dtype_of_output(interpreter, model, call, cast),
        weights_dtype=weights_dtype,
        computed_under=cast,
        model_calls=model_calls,
        node=call.node,
    )


def guessed_model(interpreter: Interpreter, call: Call, model: Model, method: str) -> Model:
    """Return a model that is created elsewhere as an instance of the only model class of the file."""
    root = interpreter.point.script.root_module
    forward = None if root is None else root.method(method)
    if root is None or forward is None or len(call.all()) > len(forward.node.args.args) - 1:
        return model
    interpreter.guesses = True
    guessed, start = Instance(f"class {root.node.name}", root), root.method("__init__")
    if start is not None and guessed.key not in interpreter.state.scopes:
        inline_call(interpreter, start, call.node, {}, guessed)
    return replace(model, instance=guessed)


def check_input(interpreter: Interpreter, call: Call, name: str, weights_dtype: str) -> None:
    """Let the rules compare the dtype of weights with that of an input, where autocast casts neither."""
    first = call.first
    # in a method, a layer may be float32 only until its model is cast
    is_certain = isinstance(first, Tensor) and (first.computed_under != "" or weights_dtype != "float32")
    if interpreter.point.autocast.enabled is False and weights_dtype and is_certain:
        call_op(interpreter, call.node, f"torch.nn.{name}", [first, Tensor(dtype=weights_dtype)])


def _weights_dtype(interpreter: Interpreter, model: Model) -> str:
    """Return the 16-bit dtype in which a model computes by its weights, outside autocast."""
    if interpreter.point.autocast.enabled is True:
        return ""
    cast = interpreter.state.weights_cast(model.key)
    return "" if cast is None else cast[0]


def _from_model(returned: Value, cast: str, model_calls: frozenset[str] | None, node: ast.Call) -> Value:
    """Return what a followed method returned, as the result of a call of the model."""
    if isinstance(returned, KnownItems):
        items = tuple(_from_model(item, cast, model_calls, node) for item in returned.items)
        return replace(returned, items=items)
    if not isinstance(returned, Tensor):
        return Tensor(computed_under=cast, model_calls=model_calls, node=node)
    return returned._replace(
        computed_under=cast or returned.computed_under,
        model_calls=model_calls,
        node=node,
        weights_dtype="",
    )


def _dtype_of_output(interpreter: Interpreter, model: Model, call: Call, cast: str) -> str:
    """Return the dtype of what a model returns by its last layer that has one; empty if it is not certain."""
    input_dtype = call.first.dtype if isinstance(call.first, Tensor) else ""
    # of the model that is followed; a layer that takes float32 was cast back
    is_16_bit = follows_operands(interpreter) and input_dtype != "float32"
    weights = interpreter.point.weights if is_16_bit else ""
    for layer in reversed(model.layers):
        if layer in MATRIX_LAYERS:
            return cast or weights
        if layer not in LAYERS_WITHOUT_DTYPE:
            return ""
    if model.layers:
        return input_dtype
    is_known = model.origin.startswith(NETWORKS)
    interpreter.guesses = interpreter.guesses or is_known
    return cast if is_known else ""


def method_of(model: Model, name: str) -> FunctionInfo | None:
    """Return a method of the class of a model, if that is known."""
    return None if model.instance is None else model.instance.info.method(name)


def applies_to_device(interpreter: Interpreter, model: Model) -> bool:
    """Return whether autocast applies to the model's device, as far as is known."""
    autocast, device = interpreter.point.autocast, interpreter.state.get(DEVICE, model.key)
    return (
        bool(interpreter.assumptions)  # as of cuda's absence, where autocast may be off for the same reason
        or autocast.enabled is not True
        or not autocast.device
        or not isinstance(device, str)
        or device == autocast.device
    )


def optimizer_method(interpreter: Interpreter, call: Call, optimizer: Optimizer, name: str) -> Value:
    """Interpret a method of an optimizer."""
    state = interpreter.state
    if name == "step":
        if call.all():  # a closure runs backward
            state.gradients = UNKNOWN_GRADIENTS
            state.reach(Phase.FRESH)
        interpreter.record(events.OptimizerStep, call.node, optimizer)
        contributions = state.gradients.known
        if contributions and not any(item.scaler for item in contributions):
            state.gradients = AccumulatedGradients()  # what is left of them is no other step's loss
        state.reach(Phase.BYPASSED)
    elif name == "zero_grad":
        zero_gradients(interpreter, call.node, optimizer.key)
    elif name == "state_dict":
        return StateDict("optimizer", optimizer.key)
    elif name == "load_state_dict" and not isinstance(call.get(0, "state_dict"), StateDict):
        interpreter.record(events.OptimizerRestored, call.node)  # from another run
    return UNKNOWN


def optimizer_value(interpreter: Interpreter, call: Call, name: str) -> Optimizer:
    """Interpret the construction of an optimizer; the name is empty for classes of other packages."""
    parameters = call.get(0, "params")
    if isinstance(parameters, KnownItems):
        groups = (g.item("params") if isinstance(g, DictLiteral) else g for g in parameters.items)
        parameters = item_of(
            KnownItems(tuple(item_of(g) if isinstance(g, KnownItems) else g or UNKNOWN for g in groups))
        )
    models = parameters.models if isinstance(parameters, Parameters) and not parameters.is_copy else None
    optimizer = Optimizer(key_of(call.node) + interpreter.call_path, name, models)
    interpreter.record(events.OptimizerMade, call.node, optimizer, call)
    if models:
        interpreter.models_by_optimizer[optimizer.key] = models
    return optimizer


_KEEPS: Final = frozenset("detach clone contiguous cpu cuda to data values items requires_grad_".split())


def copies_method(interpreter: Interpreter, call: Call, copies: Parameters, name: str) -> Value:
    """Interpret a method of weights or of copies of them."""
    dtype = requested_dtype(name, call)
    if dtype:
        cast = call.node if dtype in ("float16", "bfloat16") else None
        return replace(copies, dtype=dtype, cast=cast, is_copy=True)
    if name == "requires_grad_":
        for model in copies.models or ():
            freeze(interpreter, model, call.get(0, "requires_grad"))
    if name == "mul_":
        return replace(copies, decayed=True)
    added = name in ("add_", "addcmul_") and copies.decayed
    if added or name == "lerp_" or (name in ("copy_", "add_", "sub_") and _averages_itself(call.node)):
        interpreter.record(events.WeightsAveraged, call.node, copies)
        return copies
    if name in ("detach", "clone"):
        return replace(copies, is_copy=True)
    return copies if name in _KEEPS else UNKNOWN


def freeze(interpreter: Interpreter, model: str, value: Value | None) -> None:
    """Record that the parameters of a model are frozen if a value is false, and trained if it is not."""
    is_frozen = literal_of(value) is False
    interpreter.state.set_fact(FROZEN, True if is_frozen else None, model)


def mixes(target: ast.expr, value: ast.expr) -> bool:
    """Return whether a value is ``decay * x + (1 - decay) * y`` for a target ``x``."""
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
        return False
    lefts = [part.left for part in _differences(value)]
    has_rest = any(isinstance(left, ast.Constant) and left.value == 1 for left in lefts)
    return has_rest and ast.unparse(target) in ast.unparse(value)


def _differences(node: ast.expr) -> list[ast.BinOp]:
    return [part for part in walk(node) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub)]


def _averages_itself(node: ast.Call) -> bool:
    """Return whether a call is ``x.copy_(decay * x + (1 - decay) * y)`` or ``x.sub_(rate * (x - y))``."""
    if not isinstance(node.func, ast.Attribute) or not node.args:
        return False
    if node.func.attr == "copy_":
        return mixes(node.func.value, node.args[0])
    target = ast.unparse(node.func.value)
    sides = (side for part in _differences(node.args[0]) for side in (part.left, part.right))
    return target in map(ast.unparse, sides)
