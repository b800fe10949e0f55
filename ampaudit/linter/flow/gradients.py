"""Interprets backward passes, clipping and ``torch.autograd.grad``."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import Certainty, Fix
from ampaudit.linter.flow.events import Backward, Clip, UnknownBackward
from ampaudit.linter.flow.facts import (
    FRESH,
    IDLE,
    LEFTOVER,
    PERHAPS,
    STEPPED,
    STEPPED_LAST,
    UNSCALED_AT,
    UPDATED,
    UPDATED_EARLY,
    Stepped,
)
from ampaudit.linter.flow.gradient_uses import (
    advice_for,
    are_distinct,
    gradient_contributions,
    has_single_optimizer,
    is_unscaled,
    still_scaled,
)
from ampaudit.linter.flow.scalers import check_early
from ampaudit.linter.flow.state import NO_CONTRIBUTIONS, UNKNOWN_GRADIENTS, Contribution, item_of
from ampaudit.linter.flow.statement_context import (
    call_beside_scaler,
    following_step,
    location_suffix,
)
from ampaudit.linter.flow.values import (
    MAYBE,
    UNKNOWN,
    UNSCALED,
    KnownItems,
    LiteralValue,
    LossGradients,
    Parameters,
    ScaleReading,
    Tensor,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter
    from ampaudit.linter.flow.values import Arguments

__all__ = ["autograd_grad", "backward", "check_sharded", "clip", "unknown_backward"]


def unknown_backward(interpreter: Interpreter) -> None:
    """Interpret a backward pass of unknown code, which may scale the loss."""
    state = interpreter.state
    state.gradients = UNKNOWN_GRADIENTS
    state.clear(UPDATED)
    state.set_fact(STEPPED_LAST, None)
    state.set_fact(IDLE, PERHAPS)
    state.set_fact(FRESH, PERHAPS)
    interpreter.record(UnknownBackward(interpreter.at(interpreter.statement or interpreter.script.tree)))


def backward(interpreter: Interpreter, node: ast.Call, loss: Tensor, arguments: Arguments) -> Value:
    """Interpret ``loss.backward()``."""
    state = interpreter.state
    interpreter.record(Backward(interpreter.at(node), loss, interpreter.autocast))
    _check_accumulated(interpreter, node, loss)
    if loss.scaler_key == MAYBE:
        state.gradients = UNKNOWN_GRADIENTS
    elif loss.scaler_key != UNSCALED or not is_unscaled(interpreter):
        # what a plain loss adds to gradients that were unscaled is right
        models = loss.model_calls and frozenset(call.partition(" at ")[0] for call in loss.model_calls)
        new = Contribution(loss.scaler_key, node, loss.computed_under, models or None)
        state.gradients = state.gradients.with_contribution(new)
    if loss.scaler_key != UNSCALED:
        check_early(
            interpreter, f"the backward at line {node.lineno}, whose loss has another scale", stepped=False
        )
    state.clear(UPDATED)
    state.clear(UPDATED_EARLY)
    state.set_fact(IDLE, None)
    state.set_fact(FRESH, True)
    for key, fact in state.matching(UNSCALED_AT):
        if fact is Stepped.BY_SCALER or (fact is PERHAPS and loss.scaler_key != UNSCALED):
            state.set_fact(UNSCALED_AT, None, *key)  # these gradients are new
    state.set_fact(STEPPED_LAST, None)
    return UNKNOWN


def _check_accumulated(interpreter: Interpreter, node: ast.Call, loss: Tensor) -> None:
    if (
        loss.scaler_key in (UNSCALED, MAYBE)
        or not has_single_optimizer(interpreter)
        or gradient_contributions(interpreter) in (None, NO_CONTRIBUTIONS)
    ):
        return
    state = interpreter.state
    unscaled = [fact for _, fact in state.matching(UNSCALED_AT, loss.scaler_key)]
    stepped = state.may_hold(STEPPED, loss.scaler_key)
    if state.get(LEFTOVER) is True:
        unscaled, stepped = [node], False
    if unscaled and all(isinstance(fact, ast.AST) for fact in unscaled) and not stepped:
        interpreter.report(
            "AMP812",
            node,
            "scaled gradients are added to gradients that have already been unscaled",
            "call unscale_() once, after the last backward before the step",
        )


def check_sharded(interpreter: Interpreter, node: ast.Call, arguments: Arguments) -> None:
    """Report clipping by torch of gradients that FSDP shards: each process sees a part of their norm."""
    parameters = arguments.get(0, "parameters")
    models = parameters.models if isinstance(parameters, Parameters) else None
    tests = [ast.unparse(guard.node.test) for guard in interpreter.guards if isinstance(guard.node, ast.If)]
    has_alternative = any("clip_grad_norm_" in test for test in tests)
    if models and not has_alternative and models & interpreter.sharded - interpreter.replicated:
        interpreter.report(
            "AMP871",
            node,
            "FSDP shards the gradients: each process clips its shards by their own norm, and not by that of "
            "the whole gradient",
            "call model.clip_grad_norm_(max_norm), which FSDP adds up over all processes",
        )


def clip(
    interpreter: Interpreter,
    node: ast.Call,
    arguments: Arguments,
    certainty: Certainty = Certainty.KNOWN,
) -> Value:
    """Interpret ``clip_grad_norm_``, ``clip_grad_value_`` and the like, or what likely is one of them."""
    interpreter.record(Clip(interpreter.at(node)))
    if isinstance(arguments.get(1, "max_norm"), ScaleReading):
        return UNKNOWN  # the limit has the scale as well
    still = max(still_scaled(interpreter), _others_unscaled(interpreter, arguments))
    if certainty := min(still, certainty):
        place = call_beside_scaler(interpreter.linked, node, interpreter.calls)
        interpreter.report(
            "AMP807",
            place,
            f"the gradients are clipped{location_suffix(node, place)} while they are still scaled by the "
            "loss scale",
            advice_for(interpreter, "clip")
            or "call scaler.unscale_(optimizer) and clip right before scaler.step(optimizer)",
            _unscale_first(interpreter) if place is node else None,
            certainty,
        )
    return UNKNOWN


def _others_unscaled(interpreter: Interpreter, arguments: Arguments) -> Certainty:
    """Return how certain it is that only optimizers of other models than the clipped ones were unscaled."""
    parameters, gradients = arguments.get(0, "parameters"), interpreter.state.gradients
    models = parameters.models if isinstance(parameters, Parameters) else None
    unscaled = [
        interpreter.models_by_optimizer.get(key[1])
        for key, fact in interpreter.state.matching(UNSCALED_AT)
        if fact is not None
    ]
    scaled = gradients.contributions and all(item.scaler for item in gradients.contributions)
    if (
        not models
        or not scaled
        or not unscaled
        or any(keys is None or not are_distinct(keys, models) for keys in unscaled)
    ):
        return Certainty.UNKNOWN
    return gradients.certainty


def _unscale_first(interpreter: Interpreter) -> Fix | None:
    """Return the fix that unscales, with the names of the step that follows, before the statement."""
    statement = interpreter.statement
    step = following_step(interpreter.script, statement)
    if not isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign) or step is None:
        return None
    return Fix.at(statement, "insert before", f"{step[0]}.unscale_({step[1]})")


def autograd_grad(interpreter: Interpreter, node: ast.Call, arguments: Arguments) -> Value:
    """Interpret ``torch.autograd.grad``; with ``create_graph`` its result becomes part of a loss."""
    outputs = arguments.get(0, "outputs")
    create = arguments.get(4, "create_graph")
    if not isinstance(create, LiteralValue) or create.value is not True:
        return UNKNOWN
    first = item_of(outputs) if isinstance(outputs, KnownItems) else outputs
    if isinstance(first, Tensor):
        return LossGradients(first.scaler_key, node)
    return LossGradients(MAYBE, node)
