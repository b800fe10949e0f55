"""Interprets what computes, scales and uses gradients: backward passes, scalers, ``p.grad``."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Final

from ampaudit.linter.flow import events
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.state import (
    PERHAPS,
    STAGE,
    UNKNOWN_GRADIENTS,
    UNUSED,
    AccumulatedGradients,
    Contribution,
    Life,
    Phase,
    Stage,
    item_of,
)
from ampaudit.linter.flow.values import (
    MAYBE,
    UNKNOWN,
    UNSCALED,
    UNSCALED_TENSOR,
    Call,
    Function,
    GradAttribute,
    KnownItems,
    LiteralValue,
    LossGradients,
    Optimizer,
    Scaler,
    ScaleReading,
    StateDict,
    Tensor,
    Value,
    literal_of,
)

_NORMS: Final = frozenset({"norm", "pow", "square", "sum", "abs", "pow_"})
# the gradient itself, or a multiple of it: the scale can be taken out afterwards as well
_KEEPS_GRADIENT: Final = frozenset(
    "detach contiguous view reshape flatten cpu clone float double to to_local mul mul_ div div_".split()
)
_HARMLESS_ON_GRADIENTS: Final = frozenset(
    "isnan isinf isfinite zero_ fill_ detach_ requires_grad_ size numel dim is_contiguous untyped_storage"
    " data_ptr any all is_sparse type record_stream sign ones_like zeros_like"
    " new_empty new_full new_ones new_tensor new_zeros".split()
)


def backward(interpreter: Interpreter, node: ast.Call, loss: Tensor) -> Value:
    """Interpret ``loss.backward()``."""
    state = interpreter.state
    interpreter.record(events.Backward, node, loss)
    if loss.scaler_key == MAYBE:
        state.gradients = UNKNOWN_GRADIENTS
    elif loss.scaler_key != UNSCALED or not state.is_unscaled:
        # what a plain loss adds to gradients that were unscaled is right
        models = loss.model_calls and frozenset(call.partition(" at ")[0] for call in loss.model_calls)
        new = Contribution(loss.scaler_key, node, loss.computed_under, models or None)
        state.gradients = state.gradients.with_contribution(new)
    state.reach(Phase.FRESH)
    for key, stage in state.matching(STAGE):
        if stage is Stage.STEPPED:
            state.set_fact(STAGE, Stage.RENEWED, *key)
    return UNKNOWN


def unknown_backward(interpreter: Interpreter) -> None:
    """Interpret a backward pass of unknown code, which may scale the loss."""
    interpreter.state.gradients = UNKNOWN_GRADIENTS
    interpreter.state.life = Life()
    interpreter.record(events.UnknownBackward, interpreter.statement or interpreter.point.script.tree)


def autograd_grad(interpreter: Interpreter, call: Call) -> Value:
    """Interpret ``torch.autograd.grad``; with ``create_graph`` its result becomes part of a loss."""
    outputs = call.get(0, "outputs")
    if literal_of(call.get(4, "create_graph")) is not True:
        return UNKNOWN
    first = item_of(outputs) if isinstance(outputs, KnownItems) else outputs
    return LossGradients(first.scaler_key if isinstance(first, Tensor) else MAYBE, call.node)


def use_loss_gradients(interpreter: Interpreter, node: ast.AST, gradients: LossGradients, name: str) -> Value:
    """Interpret a function or an operator, by name, of what ``torch.autograd.grad`` returned."""
    if name not in _NORMS:
        return gradients
    interpreter.record(events.GradientNorm, node, gradients)
    return Tensor(scaler_key=gradients.scaler_key, node=node)


def gradient_method(interpreter: Interpreter, node: ast.Call, name: str) -> Value:
    """Interpret a method of ``p.grad``."""
    if name not in _HARMLESS_ON_GRADIENTS:
        interpreter.record(events.GradientRead, node, name in _KEEPS_GRADIENT)
    return GradAttribute() if name in _KEEPS_GRADIENT else UNSCALED_TENSOR


def zero_gradients(interpreter: Interpreter, node: ast.Call, optimizer: str = "") -> None:
    """Interpret ``zero_grad()`` of an optimizer, by key, or of a model."""
    state = interpreter.state
    interpreter.record(events.ZeroGrad, node, optimizer)
    state.gradients = AccumulatedGradients()
    # a step would be wrong after an early update as well; another optimizer may still have gradients
    if state.life.phase not in (Phase.EARLY, Phase.UPDATED) and has_single_optimizer(interpreter):
        state.reach(Phase.IDLE)


def has_single_optimizer(interpreter: Interpreter) -> bool:
    """Return whether the script has at most one optimizer."""
    scripts = (interpreter.point.script, interpreter.linked.main)
    return all(len(script.usage.optimizer_names) <= 1 for script in scripts)


def scaler_method(interpreter: Interpreter, call: Call, scaler: Scaler, name: str) -> Value:
    """Interpret a method of a gradient scaler."""
    interpreter.register_scaler(scaler)
    by_setting = scaler.enabled is None or scaler.node is None
    if by_setting and False in interpreter.assumptions.values():
        scaler = replace(scaler, enabled=False)  # the setting that is off may have switched it off as well
    if name == "scale":
        outputs = call.get(0, "outputs")
        interpreter.record(events.ScalerScale, call.node, scaler, outputs)
        interpreter.state.set_fact(UNUSED, None, scaler.key)
        return _scaled(outputs or UNKNOWN, scaler)
    if name == "step":
        _step(interpreter, call, scaler)
    elif name == "unscale_":
        _unscale(interpreter, call.node, scaler, call.get(0, "optimizer"))
    elif name == "update":
        interpreter.record(events.ScalerUpdate, call.node, scaler, call.get(0, "new_scale"))
        if scaler.enabled is not False:
            _update(interpreter, call.node, scaler)
    elif name == "state_dict":
        interpreter.record(events.ScalerSaved, call.node, scaler)
        return StateDict("scaler", scaler.key)
    elif name == "load_state_dict":
        interpreter.record(events.ScalerRestored, call.node, scaler)
    elif name == "is_enabled" and scaler.enabled is not None:
        return LiteralValue(scaler.enabled, is_given=True)
    elif "step" in name:  # of a derived class
        interpreter.state.assume_any_step()
    return ScaleReading(scaler.key) if name == "get_scale" else UNKNOWN


def _scaled(value: Value, scaler: Scaler) -> Value:
    if scaler.enabled is False:
        return value
    if isinstance(value, KnownItems):
        return replace(value, items=tuple(_scaled(item, scaler) for item in value.items))
    base = value if isinstance(value, Tensor) else UNSCALED_TENSOR._replace(model_calls=None)
    return base._replace(scaler_key=scaler.key if base.scaler_key in (UNSCALED, scaler.key) else MAYBE)


def _step(interpreter: Interpreter, call: Call, scaler: Scaler) -> None:
    state, target = interpreter.state, call.get(0, "optimizer")
    optimizer = target if isinstance(target, Optimizer) else None
    has_closure = (
        isinstance(call.get(1, "closure"), Function)
        or isinstance(call.expression(1, "closure"), ast.Lambda)
        or (optimizer is not None and optimizer.class_name == "LBFGS")
    )
    if scaler.enabled is not False and has_closure:  # which runs backward
        state.assume_any_step()
    interpreter.record(events.ScalerStep, call.node, optimizer, scaler, has_closure)
    if optimizer is None:
        state.assume_any_step()
    elif scaler.enabled is False:
        state.gradients = AccumulatedGradients()
    else:
        state.set_fact(STAGE, Stage.STEPPED, scaler.key, optimizer.key)
        state.reach(Phase.STEPPED, stepped=optimizer.key)
        is_alone = has_single_optimizer(interpreter) and not optimizer.one_of_several
        if is_alone and state.gradients.known is not None:
            state.gradients = AccumulatedGradients()  # the step has unscaled the gradients


def _unscale(interpreter: Interpreter, node: ast.Call, scaler: Scaler, target: Value | None) -> None:
    state, optimizer = interpreter.state, target if isinstance(target, Optimizer) else None
    interpreter.record(events.ScalerUnscale, node, scaler, optimizer)
    if optimizer is None:
        state.assume_any_step()
    elif scaler.enabled is not False and state.get(STAGE, scaler.key, optimizer.key) is not Stage.STEPPED:
        state.set_fact(STAGE, Stage.UNSCALED, scaler.key, optimizer.key)


def _update(interpreter: Interpreter, node: ast.Call, scaler: Scaler) -> None:
    state, stages = interpreter.state, set(interpreter.state.stages(scaler.key))
    contributions = state.gradients.known
    all_by_scaler = bool(contributions) and all(item.scaler == scaler.key for item in contributions or ())
    if state.life.phase in (Phase.FRESH, Phase.EARLY, Phase.LOOKED) and all_by_scaler:
        state.reach(Phase.LOOKED if stages - {Stage.RENEWED} else Phase.EARLY, node, scaler.key)
    elif stages & {Stage.STEPPED, Stage.RENEWED} or state.life.phase is Phase.BYPASSED:
        if state.life.phase in (Phase.STEPPED, Phase.BYPASSED):
            state.gradients = AccumulatedGradients()
        state.reach(Phase.UPDATED, node, scaler.key)
    elif PERHAPS in stages:
        state.gradients = UNKNOWN_GRADIENTS
        state.life = Life()
    state.clear(STAGE, scaler.key)
