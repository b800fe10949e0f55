"""Interprets the methods of a gradient scaler: scale, unscale_, step, update."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ampaudit.linter.diagnostic import Certainty, Fix, line_of, position_of, remove_statement
from ampaudit.linter.flow.events import (
    ScaleRead,
    ScalerRestored,
    ScalerSaved,
    ScalerScale,
    ScalerStep,
    ScalerUnscale,
    ScalerUpdate,
    ScaleSet,
    of_type,
)
from ampaudit.linter.flow.facts import (
    FRESH,
    FROZEN,
    HALF_WEIGHTS,
    HALVED_IN_LOOP,
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
    EarlyUpdate,
    Stepped,
)
from ampaudit.linter.flow.gradient_uses import are_distinct, gradient_contributions, has_single_optimizer
from ampaudit.linter.flow.state import NO_CONTRIBUTIONS, UNKNOWN_GRADIENTS, AccumulatedGradients, Contribution
from ampaudit.linter.flow.statement_context import in_same_function, nodes_around
from ampaudit.linter.flow.syntax import dotted_name, receiver_name
from ampaudit.linter.flow.values import (
    MAYBE,
    UNKNOWN,
    UNSCALED,
    UNSCALED_TENSOR,
    BoundMethod,
    Function,
    KnownItems,
    Optimizer,
    Scaler,
    ScaleReading,
    StateDict,
    Tensor,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter
    from ampaudit.linter.flow.values import Arguments

__all__ = ["check_adapters", "check_early", "scaler_method"]


def scaler_method(
    interpreter: Interpreter, node: ast.Call, scaler: Scaler, name: str, arguments: Arguments
) -> Value:
    """Interpret a method of a gradient scaler."""
    interpreter.register_scaler(scaler)
    if name == "scale":
        return _scale(interpreter, node, scaler, arguments)
    target = arguments.get(0, "optimizer")
    if name == "step" and isinstance(target, Optimizer):
        _step(interpreter, node, scaler, target, arguments)
    elif name == "unscale_" and isinstance(target, Optimizer):
        _unscale(interpreter, node, scaler, target)
    elif name in ("step", "unscale_"):
        place = interpreter.at(node)
        interpreter.record(
            ScalerStep(place, "", interpreter.autocast, scaler.key)
            if name == "step"
            else ScalerUnscale(place, scaler.key)
        )
        interpreter.state.gradients = UNKNOWN_GRADIENTS
        interpreter.state.invalidate(UNSCALED_AT, STEPPED, UPDATED_EARLY)
        interpreter.state.set_fact(TOUCHED, PERHAPS)
    elif name == "update":
        _update(interpreter, node, scaler)
    elif name == "state_dict":
        interpreter.record(ScalerSaved(interpreter.at(node), scaler.key))
        return StateDict("scaler", scaler.key)
    elif name == "load_state_dict":
        interpreter.record(ScalerRestored(interpreter.at(node), scaler.key))
    elif name in ("get_scale", "_get_scale_async", "is_enabled"):
        interpreter.record(ScaleRead(interpreter.at(node), scaler.key))
        return ScaleReading(scaler.key) if name == "get_scale" else UNKNOWN
    return UNKNOWN


def _scale(interpreter: Interpreter, node: ast.Call, scaler: Scaler, arguments: Arguments) -> Value:
    value = arguments.get(0, "outputs")
    interpreter.record(ScalerScale(interpreter.at(node), scaler.key))
    interpreter.state.set_fact(UNUSED, None, scaler.key)
    if scaler.enabled is False:
        return value if value is not None else UNKNOWN
    if isinstance(value, Tensor) and value.computed_under == "bfloat16" and scaler.enabled is True:
        check_bfloat16(interpreter, node, scaler)
    if isinstance(value, KnownItems):
        return KnownItems(tuple(_scaled_value(item, scaler) for item in value.items), value.repeated)
    return _scaled_value(value if value is not None else UNKNOWN, scaler)


def _scaled_value(value: Value, scaler: Scaler) -> Value:
    base = value if isinstance(value, Tensor) else replace(UNSCALED_TENSOR, model_calls=None)
    return replace(base, scaler_key=scaler.key if base.scaler_key in (UNSCALED, scaler.key) else MAYBE)


def _step(
    interpreter: Interpreter, node: ast.Call, scaler: Scaler, optimizer: Optimizer, arguments: Arguments
) -> None:
    state = interpreter.state
    key = optimizer.key if not optimizer.one_of_several else ""
    interpreter.record(ScalerStep(interpreter.at(node), key, interpreter.autocast, scaler.key))
    if scaler.enabled is False:
        state.gradients = AccumulatedGradients()
        return
    closure = arguments.get(1, "closure")
    lambdas = isinstance(arguments.expression(1, "closure"), ast.Lambda)
    if isinstance(closure, Function | BoundMethod) or lambdas or optimizer.class_name == "LBFGS":
        interpreter.report(
            "AMP816",
            node,
            "the scaler does not support an optimizer that recomputes the loss in a closure",
            "use an optimizer without a closure, or train in bfloat16 or float32 without a scaler",
        )
        state.gradients = UNKNOWN_GRADIENTS
        state.set_fact(UNUSED, None, scaler.key)
        state.set_fact(STEPPED, Stepped.BY_SCALER, scaler.key, optimizer.key)
        state.set_fact(UPDATED, PERHAPS, scaler.key)
        return
    if scaler.enabled is True:
        check_parameters(interpreter, scaler, optimizer, node)
        check_adapters(interpreter, node)
    check_gradients(interpreter, scaler, optimizer, node)
    check_paired(interpreter, optimizer, node)
    check_unscaled_by_another(interpreter, scaler, optimizer, node)
    check_order(interpreter, scaler, node)
    check_repeated(interpreter, scaler, optimizer, node)
    state.set_fact(STEPPED, Stepped.BY_SCALER, scaler.key, optimizer.key)
    state.set_fact(UNSCALED_AT, Stepped.BY_SCALER, scaler.key, optimizer.key)
    state.set_fact(STEPPED_LAST, optimizer.key)
    if (
        has_single_optimizer(interpreter)
        and not optimizer.one_of_several
        and gradient_contributions(interpreter) is not None
    ):
        state.gradients = AccumulatedGradients()  # the step has unscaled the gradients
    state.set_fact(UPDATED_EARLY, None, scaler.key)
    state.set_fact(FRESH, None)


def _unscale(interpreter: Interpreter, node: ast.Call, scaler: Scaler, optimizer: Optimizer) -> None:
    state = interpreter.state
    interpreter.record(ScalerUnscale(interpreter.at(node), scaler.key))
    if scaler.enabled is False:
        return
    first = interpreter.is_first_iteration or has_update(interpreter, scaler)
    if scaler.enabled is True:
        check_parameters(interpreter, scaler, optimizer, node)
    key = (scaler.key, optimizer.key)
    if first and not optimizer.one_of_several and state.get(STEPPED, *key) is Stepped.BY_SCALER:
        interpreter.report(
            "AMP809",
            node,
            "unscale_() runs after the step of this optimizer, which has already unscaled the gradients",
            "call unscale_() between backward and step",
        )
    elif first and not optimizer.one_of_several and state.known_at(UNSCALED_AT, *key):
        interpreter.report(
            "AMP809",
            node,
            "unscale_() has already been called for this optimizer since the last update()",
            "call it once per step",
            remove_statement(interpreter.statement, node),
        )
    elif not optimizer.one_of_several and True in (state.get(IDLE), state.get(UNUSED, scaler.key)):
        interpreter.report(
            "AMP809",
            node,
            "unscale_() runs before there are gradients of a scaled loss",
            "call it after backward, and before the step",
        )
    check_early(
        interpreter, f"unscale_() at line {node.lineno}, which then divides by another scale", stepped=False
    )
    state.set_fact(UNSCALED_AT, node, scaler.key, optimizer.key)


def _update(interpreter: Interpreter, node: ast.Call, scaler: Scaler) -> None:
    state = interpreter.state
    sets_scale = bool(node.args or node.keywords)  # which needs no step before it
    place = interpreter.at(node)
    interpreter.record(ScaleSet(place, scaler.key) if sets_scale else ScalerUpdate(place, scaler.key))
    if scaler.enabled is False or sets_scale:
        return
    check_update(interpreter, node, scaler)
    stepped = [fact for _, fact in state.matching(STEPPED, scaler.key) if fact is not None]
    contributions = gradient_contributions(interpreter)
    all_by_scaler = bool(contributions) and all(item.scaler == scaler.key for item in contributions or ())
    fresh = state.get(FRESH) is True and state.get(TOUCHED) is None
    if all_by_scaler and fresh:
        looked = state.may_hold(UNSCALED_AT, scaler.key)
        state.set_fact(UPDATED_EARLY, EarlyUpdate(node, looked), scaler.key)
        state.set_fact(LEFTOVER, True if looked else None)
    elif any(isinstance(fact, Stepped) for fact in stepped):
        is_certain = state.get(UPDATED, scaler.key) is not PERHAPS
        state.set_fact(UPDATED, node if is_certain else PERHAPS, scaler.key)
        if state.get(FRESH) is None:
            state.gradients = AccumulatedGradients()
        state.set_fact(IDLE, True if is_certain else PERHAPS)
    elif stepped:
        state.set_fact(UPDATED, PERHAPS, scaler.key)
        state.gradients = UNKNOWN_GRADIENTS
        state.set_fact(IDLE, PERHAPS)
    state.clear(STEPPED, scaler.key)
    state.clear(UNSCALED_AT, scaler.key)


def check_bfloat16(interpreter: Interpreter, node: ast.Call, scaler: Scaler) -> None:
    """Report a scaler for bfloat16 gradients, which need no scale."""
    place = scaler.node if scaler.node is not None else node
    fix = None
    if isinstance(place, ast.Call) and not _may_set_enabled(place):
        fix = Fix.at(place, "set keyword", "enabled", "False")
    interpreter.report(
        "AMP818",
        place,
        "the loss is computed in bfloat16, which has the range of float32: its gradients need no loss scale",
        "remove the scaler, or create it with enabled=False",
        fix,
    )


def _may_set_enabled(call: ast.Call) -> bool:
    """Return whether a call of a GradScaler may pass ``enabled``, its fifth or sixth argument."""
    starred = any(isinstance(argument, ast.Starred) for argument in call.args)
    return starred or len(call.args) > 4 or any(k.arg in ("enabled", None) for k in call.keywords)


def check_parameters(interpreter: Interpreter, scaler: Scaler, optimizer: Optimizer, node: ast.Call) -> None:
    """Report parameters whose gradients a scaler cannot unscale: float16, or in shards of FSDP."""
    plain = isinstance(scaler.node, ast.Call) and not scaler.sharded
    if plain and scaler.node is not None and interpreter.sharded & (optimizer.models or frozenset()):
        interpreter.report(
            "AMP857",
            scaler.node,
            "FSDP shards the gradients, and each process looks for infinities in its own: the processes skip"
            " different steps, and their scales part",
            "use torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
        )
    for model in optimizer.models or ():
        halved = interpreter.state.trained_cast(HALF_WEIGHTS, model)
        certainty = Certainty.LIKELY if halved is None else Certainty.KNOWN
        halved = halved or interpreter.state.trained_cast(HALVED_IN_LOOP, model)
        if halved is not None:
            interpreter.report(
                "AMP801",
                halved,
                f"these parameters are float16, and the scaler at line {node.lineno} cannot unscale float16"
                " gradients",
                "keep the parameters in float32 and let autocast choose the dtype of each op",
                certainty=certainty,
            )


def check_adapters(interpreter: Interpreter, node: ast.Call) -> None:
    """Report adapters that are cast to float16 together with the frozen model that they were put into."""
    state = interpreter.state
    for (model, *_), fact in state.matching(HALF_WEIGHTS):
        if not isinstance(fact, ast.AST) or state.get(FROZEN, model) is None:
            continue
        line = line_of(fact)
        calls = (
            n for n in nodes_around(interpreter.linked, fact) if isinstance(n, ast.Call) and n.lineno < line
        )
        put_before = any(_ADAPTS.search(dotted_name(call.func).lower()) for call in calls)
        if put_before and not interpreter.linked.mentions(_CASTS_BACK):
            interpreter.report(
                "AMP801",
                fact,
                "this casts the adapters that the frozen model was given before to float16 as well, and the "
                f"scaler of line {node.lineno} cannot unscale float16 gradients",
                "cast the frozen model first, or cast what is trained back to float32",
                certainty=Certainty.LIKELY,
            )


_ADAPTS: Final = re.compile(r"inject|adapter|peft|lora")
_CASTS_BACK: Final = r"\.data = |cast_training_params|\(torch\.float32\)|dtype=torch\.float32|upcast"


def check_gradients(interpreter: Interpreter, scaler: Scaler, optimizer: Optimizer, step: ast.Call) -> None:
    """Report gradients that the scaler is about to unscale and that were not scaled by it."""
    contributions = gradient_contributions(interpreter)
    if not contributions:
        return
    _check_unused(interpreter, scaler, optimizer, step, contributions)
    others = {item.scaler for item in contributions} - {scaler.key, ""}
    if others and has_single_optimizer(interpreter) and not optimizer.one_of_several:
        odd = next(item for item in contributions if item.scaler in others)
        interpreter.report(
            "AMP815",
            odd.node,
            "this loss is scaled by another scaler than the other "
            "losses that contribute to the same gradients",
            "use one scaler for all losses of an optimizer",
        )
    for item in contributions:
        if not item.scaler and (
            has_single_optimizer(interpreter) or not any(other.scaler for other in contributions)
        ):
            _report_unscaled_loss(interpreter, step, item)


def _check_unused(
    interpreter: Interpreter,
    scaler: Scaler,
    optimizer: Optimizer,
    step: ast.Call,
    contributions: frozenset[Contribution],
) -> None:
    """Report a step by a scaler that has scaled no loss, although others have."""
    if interpreter.state.get(UNUSED, scaler.key) is not True or not all(
        item.scaler for item in contributions
    ):
        return
    of_optimizer = [
        i for i in contributions if not i.models or not optimizer.models or i.models & optimizer.models
    ]
    last = max(of_optimizer or contributions, key=lambda item: position_of(item.node))
    interpreter.report(
        "AMP815",
        last.node,
        f"this loss is scaled by another scaler than the one that steps at line {step.lineno}, which has "
        "scaled nothing: its step raises",
        "scale each loss by the scaler that steps its optimizer",
    )


def check_unscaled_by_another(
    interpreter: Interpreter, scaler: Scaler, optimizer: Optimizer, step: ast.Call
) -> None:
    """Report an optimizer that one scaler unscales and another steps."""
    for key, place in interpreter.state.matching(UNSCALED_AT):
        other = interpreter.scalers.get(key[0])
        if key[1:] != (optimizer.key,) or key[0] == scaler.key or other is None:
            continue
        if isinstance(place, ast.AST):
            are_made_here = scaler.node is not None and other.node is not None
            interpreter.report(
                "AMP815",
                place,
                "this scaler unscales the gradients of an optimizer that another one steps, at line "
                f"{step.lineno}: it divides them by the wrong scale, and the step divides them again",
                "unscale with the scaler that scaled the loss and steps",
                certainty=Certainty.KNOWN if are_made_here else Certainty.LIKELY,
            )


def _report_unscaled_loss(interpreter: Interpreter, step: ast.Call, item: Contribution) -> None:
    node = item.node
    text = receiver_name(step) if in_same_function(interpreter.linked, step, node) else ""
    function = node.func if isinstance(node, ast.Call) else None
    is_named = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name | ast.Attribute)
    interpreter.report(
        "AMP802",
        node,
        "backward runs on the unscaled loss, but the scaler divides the gradients by the scale",
        f"write {text or 'scaler'}.scale(loss).backward()",
        Fix.at(node, "scale loss", text) if is_named and text else None,
    )


def check_paired(interpreter: Interpreter, optimizer: Optimizer, step: ast.Call) -> None:
    """Report the step of an optimizer none of whose parameters took part in a loss."""
    contributions, models = gradient_contributions(interpreter), optimizer.models
    if not contributions or not models or optimizer.one_of_several:
        return
    if all(item.models is not None and are_distinct(item.models, models) for item in contributions):
        interpreter.report(
            "AMP829",
            step,
            "no loss of this iteration depends on the parameters of this optimizer: the scaler finds no "
            "gradients to check, and raises",
            "step the optimizer whose model the loss is computed with",
        )


def check_order(interpreter: Interpreter, scaler: Scaler, node: ast.Call) -> None:
    """Report an update that came too early for this step."""
    state = interpreter.state
    check_early(
        interpreter, f"the step at line {node.lineno}, which then divides by another scale", stepped=True
    )
    updated = state.get(UPDATED, scaler.key)
    if isinstance(updated, ast.AST):
        interpreter.report(
            "AMP806",
            updated,
            "update() runs between the steps of several optimizers, whose gradients share one scale",
            "call update() once, after the steps of all optimizers",
        )


def check_early(interpreter: Interpreter, what: str, *, stepped: bool) -> None:
    """Report an update between the first scaled backward and the step.

    After unscale_(), which checks for overflow, a script may skip the step and call update() at once.
    """
    for _, early in interpreter.state.matching(UPDATED_EARLY):
        if isinstance(early, EarlyUpdate) and (stepped or not early.looked):
            interpreter.report(
                "AMP806",
                early.node,
                f"update() runs before {what}",
                "call update() once per iteration, after every step",
            )


def check_repeated(interpreter: Interpreter, scaler: Scaler, optimizer: Optimizer, node: ast.Call) -> None:
    """Report a second step of an optimizer, or a step before any loss was scaled."""
    is_unused = interpreter.state.get(UNUSED, scaler.key) is True
    if is_unused and gradient_contributions(interpreter) == NO_CONTRIBUTIONS:
        interpreter.report(
            "AMP809",
            node,
            "step() runs before any loss was scaled",
            "call it after backward on a scaled loss",
        )
    stepped = interpreter.state.get(STEPPED, scaler.key, optimizer.key) is Stepped.BY_SCALER
    is_current = interpreter.is_first_iteration or has_update(interpreter, scaler)
    if stepped and not optimizer.one_of_several and is_current:
        interpreter.report(
            "AMP809",
            node,
            "the scaler has already stepped this optimizer since the last update()",
            "step each optimizer once, then call update()",
        )


def has_update(interpreter: Interpreter, scaler: Scaler) -> bool:
    """Return whether the scaler is updated at all; if not, that is the mistake to report."""
    updates = of_type(interpreter.events.values(), ScalerUpdate)
    return any(update.scaler == scaler.key for update in updates)


def check_update(interpreter: Interpreter, node: ast.Call, scaler: Scaler) -> None:
    """Report an update that follows no step."""
    state = interpreter.state
    stepped = state.may_hold(STEPPED, scaler.key)
    looked = state.may_hold(UNSCALED_AT, scaler.key)
    again = state.known_at(UPDATED, scaler.key) is not None and not stepped and not looked
    if again or (state.get(UNUSED, scaler.key) is True and not stepped):
        interpreter.report(
            "AMP806",
            node,
            "update() runs again, although no optimizer has been stepped since the last one"
            if again
            else "update() runs before any loss was scaled",
            "call it once per iteration, after the steps",
        )
