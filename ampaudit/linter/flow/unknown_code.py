"""Interprets calls of unknown code, which may do anything to its arguments."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import Certainty
from ampaudit.linter.flow import gradients, tensors
from ampaudit.linter.flow.arguments import Arguments
from ampaudit.linter.flow.constructors import make_scaler
from ampaudit.linter.flow.definitions import Function, Instance
from ampaudit.linter.flow.events import UnknownEffect
from ampaudit.linter.flow.facts import (
    BFLOAT16_WEIGHTS,
    FRESH,
    HALF_WEIGHTS,
    IDLE,
    LEFTOVER,
    PERHAPS,
    STEPPED,
    STEPPED_LAST,
    TOUCHED,
    UNSCALED_AT,
    UNUSED,
    UPDATED,
    UPDATED_EARLY,
    ZEROED,
)
from ampaudit.linter.flow.inlining import follow_callback
from ampaudit.linter.flow.losses import record_loss
from ampaudit.linter.flow.state import UNKNOWN_GRADIENTS
from ampaudit.linter.flow.torch_names import HARMLESS_METHODS
from ampaudit.linter.flow.values import (
    UNKNOWN,
    UNSCALED_TENSOR,
    KnownItems,
    Managed,
    Model,
    Optimizer,
    Parameters,
    Scaler,
    Tensor,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter


__all__ = ["assume_any_effect", "unknown_call"]


def unknown_call(interpreter: Interpreter, node: ast.Call, name: str, arguments: Arguments) -> Value:
    """Interpret a call of code that is not in this file."""
    last = name.rpartition(".")[2]
    if last.endswith("GradScaler"):  # another package's, or one of two that are imported
        return make_scaler(interpreter, node, name, arguments)
    if last == "backward":
        gradients.unknown_backward(interpreter)
        return UNKNOWN
    values = arguments.all()
    for value in values:
        if isinstance(value, Function) and value.info.relevant and value.info not in interpreter.called:
            follow_callback(interpreter, value, node)
    if _LOSS.search(last.lower()):
        record_loss(interpreter, node, values)
    if _CLIPS_GRADIENTS.search(last.lower()) and _cannot_unscale(interpreter, values):
        gradients.clip(interpreter, node, arguments, certainty=Certainty.LIKELY)
    if last not in HARMLESS_METHODS:
        assume_any_effect(interpreter, name, values)
    touched = any(isinstance(value, Scaler | Instance) for value in values)
    return UNKNOWN if touched else _unknown_result(interpreter, values)


def _unknown_result(interpreter: Interpreter, values: list[Value]) -> Value:
    """Return what unknown code returns, which is scaled only if an argument is."""
    tensor_arguments = [value for value in values if isinstance(value, Tensor)]
    if any(value.scaler_key for value in tensor_arguments):
        return UNKNOWN
    computed_under = tensors.autocast_dtype(interpreter) or next(
        (value.computed_under for value in tensor_arguments if value.computed_under), ""
    )
    return Tensor(computed_under=computed_under) if computed_under else UNSCALED_TENSOR


def assume_any_effect(interpreter: Interpreter, name: str, values: list[Value]) -> None:
    """Invalidate every fact that unknown code may change through its arguments."""
    last = name.rpartition(".")[2].lower()
    state = interpreter.state
    flat = [item for value in values for item in (value.items if isinstance(value, KnownItems) else (value,))]
    instances = [value for value in flat if isinstance(value, Instance)]
    for owner in instances:
        flat += state.scopes.get(owner.key, {}).values()
    for value in flat if _CASTS_PARAMETERS.search(last) else ():
        if isinstance(value, Model) and state.get(HALF_WEIGHTS, value.key) is not None:
            state.set_fact(HALF_WEIGHTS, PERHAPS, value.key)
        if isinstance(value, Model):
            state.set_fact(BFLOAT16_WEIGHTS, None, value.key)
    interpreter.escaped.update(value.key for value in flat if isinstance(value, Scaler | Optimizer))
    state.invalidate(UPDATED, IDLE, FRESH)
    reaches = any(isinstance(value, Scaler | Optimizer) for value in flat)
    trains = "backward" in last or last.endswith("step") or ("train" in last and bool(values))
    handles = any(isinstance(value, Scaler) for value in values) or _HANDLES_GRADIENTS.search(last)
    if trains or (reaches and handles):
        state.gradients = UNKNOWN_GRADIENTS
        state.invalidate(UNSCALED_AT)
    elif reaches:
        state.gradients = state.gradients.weakened()
        for key, unscaled in state.matching(UNSCALED_AT):
            state.set_fact(UNSCALED_AT, PERHAPS if unscaled is not None else None, *key)
    if reaches or trains:
        interpreter.record(UnknownEffect(interpreter.at(interpreter.statement or interpreter.script.tree)))
        state.invalidate(STEPPED, UPDATED_EARLY, ZEROED, STEPPED_LAST, UNUSED, LEFTOVER)
        state.set_fact(TOUCHED, PERHAPS)


def _cannot_unscale(interpreter: Interpreter, values: list[Value]) -> bool:
    """Return whether unknown code gets parameters, and neither a scaler nor what may hold one."""
    may_unscale = any(isinstance(value, Scaler | Optimizer | Instance | Managed) for value in values)
    return not may_unscale and any(isinstance(value, Parameters | Model) for value in values)


_CASTS_PARAMETERS = re.compile(r"cast|float|fp32|convert|precision|lora|peft|adapter")


_CLIPS_GRADIENTS = re.compile(r"clip.*(grad|norm)|grad.*clip")


_LOSS = re.compile(r"loss|criterion|^crit$|^cost$")


_HANDLES_GRADIENTS = re.compile(r"scale|clip|norm|update|optim|amp")
