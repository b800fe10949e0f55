"""Interprets models, schedulers and instances of the file's classes."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ampaudit.linter.diagnostic import key_of
from ampaudit.linter.flow.contexts import ContextManager
from ampaudit.linter.flow.definitions import ClassInfo, Instance
from ampaudit.linter.flow.devices import move_model
from ampaudit.linter.flow.events import PrecisionChosen, ZeroGrad
from ampaudit.linter.flow.facts import (
    BFLOAT16_WEIGHTS,
    CAST_BY_DTYPE,
    DEVICE,
    HALF_WEIGHTS,
    HALVED_IN_LOOP,
    PERHAPS,
    PerhapsHalf,
)
from ampaudit.linter.flow.fields import bind_fields
from ampaudit.linter.flow.gradient_uses import clear_gradients
from ampaudit.linter.flow.gradients import clip, unknown_backward
from ampaudit.linter.flow.inlining import inline_call
from ampaudit.linter.flow.model_calls import call_model, guessed_model, method_of
from ampaudit.linter.flow.tensors import dtype_named, requested_dtype
from ampaudit.linter.flow.values import UNKNOWN, DtypeChoice, KnownItems, Model, Parameters, Tensor, Value
from ampaudit.linter.flow.weight_copies import freeze

if TYPE_CHECKING:
    from ampaudit.linter.flow.arguments import Arguments
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = [
    "MODULE_METHODS",
    "make_instance",
    "make_model",
    "model_method",
]

MODULE_METHODS: Final = frozenset(
    "train eval to cuda cpu half float parameters named_parameters modules children state_dict"
    " load_state_dict register_buffer register_parameter zero_grad apply requires_grad_ log log_dict".split()
)
_WITHOUT_FORWARD: Final = MODULE_METHODS | frozenset(
    "named_modules named_children get_parameter buffers named_buffers compile share_memory"
    " gradient_checkpointing_enable enable_input_require_grads save_pretrained push_to_hub"
    " print_trainable_parameters set_epoch init_weights freeze unfreeze add_module load_adapter".split()
)


_TRAINS: Final = re.compile(r"backward|train_|_step$|optimi[sz]e_|learn")


def make_model(interpreter: Interpreter, node: ast.Call, origin: str, arguments: Arguments) -> Model:
    """Create a model that is constructed or loaded here."""
    model = Model(
        key_of(node) + interpreter.call_path, node, origin=origin, layers=_layers(origin, arguments)
    )
    is_quantized = "quantization_config" in arguments.keywords  # which is trained through adapters
    for name in () if is_quantized else ("dtype", "torch_dtype"):
        dtype = dtype_named(arguments.keywords.get(name, UNKNOWN))
        if dtype in CAST_BY_DTYPE:
            interpreter.state.set_fact(CAST_BY_DTYPE[dtype], node, model.key)
    return model


def _layers(origin: str, arguments: Arguments) -> tuple[str, ...]:
    name = origin.rpartition(".")[2]
    if not origin.startswith("torch.nn."):
        return ()
    if name != "Sequential":
        return (name,)
    parts = [value.layers if isinstance(value, Model) else ("",) for value in arguments.positional]
    return tuple(layer for part in parts for layer in (part or ("",)))


def check_apex_models(interpreter: Interpreter, node: ast.Call, arguments: Arguments) -> None:
    """Check that ``amp.initialize`` gets models that are not wrapped yet, since it refuses others."""
    models = arguments.get(0, "models")
    interpreter.record(PrecisionChosen(interpreter.at(node)))
    for model in models.items if isinstance(models, KnownItems) else (models,):
        if isinstance(model, Model) and model.wrapper:
            interpreter.report(
                "AMP858",
                node,
                f"this model is already inside {model.wrapper}, which amp.initialize refuses: it casts the "
                "parameters before they are wrapped",
                "call amp.initialize first and wrap what it returns",
            )


def model_method(
    interpreter: Interpreter, node: ast.Call, model: Model, name: str, arguments: Arguments
) -> Value:
    """Interpret a method of a model."""
    state = interpreter.state
    if name in ("half", "float", "bfloat16", "double", "to", "type"):
        _cast(interpreter, node, model, name, arguments)
        move_model(interpreter, model, arguments)
        return model
    if name in ("cuda", "cpu"):
        state.set_fact(DEVICE, name, model.key)
        return model
    if name in ("parameters", "named_parameters", "state_dict"):
        return Parameters(frozenset({model.key}))
    if name == "zero_grad":
        clear_gradients(interpreter)
        interpreter.record(ZeroGrad(interpreter.at(node), ""))
        return UNKNOWN
    if name in ("clip_grad_norm_", "clip_grad_value_"):
        return clip(interpreter, node, arguments)
    if name == "no_sync":
        return ContextManager("no_sync")
    if name == "requires_grad_":
        freeze(interpreter, model.key, arguments.get(0, "requires_grad"))
    if name in ("train", "eval", "requires_grad_", "apply"):
        return model
    if model.instance is None and model.key.startswith("name ") and name not in _WITHOUT_FORWARD:
        model = guessed_model(interpreter, node, model, arguments, name)
    if _TRAINS.search(name) and method_of(model, name) is None:
        unknown_backward(interpreter)
        return UNKNOWN
    if name in _WITHOUT_FORWARD or "optim" in name:
        return UNKNOWN
    method = "forward" if name in ("forward", "__call__") else name
    value = call_model(interpreter, node, model, arguments, method)
    if method == "forward" or not isinstance(value, Tensor) or method_of(model, method) is not None:
        return value
    return Tensor(computed_under=value.computed_under)  # what it returns may be of several graphs


def _cast(interpreter: Interpreter, node: ast.Call, model: Model, name: str, arguments: Arguments) -> None:
    dtype = requested_dtype(name, arguments)
    if dtype == "float16":
        interpreter.record(PrecisionChosen(interpreter.at(node)))
    if dtype:
        in_loop = any(guard.kind == "loop" for guard in interpreter.guards)
        halved = node if dtype == "float16" and in_loop else None
        interpreter.state.set_fact(HALVED_IN_LOOP, halved, model.key)
        interpreter.state.set_fact(HALF_WEIGHTS, node if dtype == "float16" else None, model.key)
        interpreter.state.set_fact(BFLOAT16_WEIGHTS, node if dtype == "bfloat16" else None, model.key)
    elif any(isinstance(value, DtypeChoice) and "float16" in value.names for value in arguments.all()):
        interpreter.state.set_fact(HALF_WEIGHTS, PerhapsHalf(node), model.key)
    elif (
        any(value is UNKNOWN or isinstance(value, DtypeChoice) for value in arguments.all())
        and interpreter.state.get(HALF_WEIGHTS, model.key) is not None
    ):
        interpreter.state.set_fact(HALF_WEIGHTS, PERHAPS, model.key)
        interpreter.state.set_fact(BFLOAT16_WEIGHTS, None, model.key)


def make_instance(interpreter: Interpreter, node: ast.Call, info: ClassInfo, arguments: Arguments) -> Value:
    """Create an instance of a class of the file."""
    if info.derives("Optimizer"):
        return UNKNOWN
    is_module = info.derives("Module", "LightningModule")
    instance = Instance(f"{info.node.name} {key_of(node)}{interpreter.call_path}", info)
    start, half = info.method("__init__"), None
    if start is not None and (start.relevant or is_module):
        half, interpreter.half_parameter = interpreter.half_parameter, None
        inline_call(interpreter, start, node, arguments.named(), instance)
        half, interpreter.half_parameter = interpreter.half_parameter, half
    elif start is None:
        bind_fields(interpreter, instance, arguments)
    if is_module:
        model = make_model(interpreter, node, info.node.name, arguments)
        if half is not None:
            interpreter.state.set_fact(HALF_WEIGHTS, half, model.key)
        return replace(model, instance=instance)
    return instance
