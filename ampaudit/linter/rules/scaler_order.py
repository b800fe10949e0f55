"""Rules on the order in which a scaler and its optimizers are called.

Each call is compared with what the flow knows before it: the stage of the optimizer, the phase of all
gradients, and whether the scaler has scaled anything so far.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Final

from ampaudit.linter.diagnostic import Certainty, Fix, Mistake, line_of, position_of, remove_statement
from ampaudit.linter.flow.events import (
    Backward,
    EntryPointFollowed,
    Event,
    OptimizerStep,
    ScalerStep,
    ScalerUnscale,
    ScalerUpdate,
    StepEvent,
    UnknownEffect,
    ZeroGrad,
    of_type,
)
from ampaudit.linter.flow.gradients import has_single_optimizer
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.state import PERHAPS, STAGE, UNUSED, AccumulatedGradients, Phase, Stage
from ampaudit.linter.flow.statement_context import scaler_in_scope
from ampaudit.linter.flow.syntax import mentions, simple_name
from ampaudit.linter.flow.values import MAYBE, UNSCALED
from ampaudit.linter.rules.rule import rule

_BEFORE_USE: Final = "before any loss was scaled"
_TWICE: Final = (
    "the scaler has already stepped this optimizer since the last update()",
    "step each optimizer once, then call update()",
)
_AFTER_STEP: Final = (
    "unscale_() runs after the step of this optimizer, which has already unscaled the gradients",
    "call unscale_() between backward and step",
)
_NOTHING_SCALED: Final = (
    "unscale_() runs before there are gradients of a scaled loss",
    "call it after backward, and before the step",
)
# what no scaler may do: cause and advice, by call and by what it meets
_MISPLACED: Final[Mapping[tuple[type[Event], object], tuple[str, str]]] = {
    (ScalerUnscale, Stage.STEPPED): _AFTER_STEP,
    (ScalerUnscale, Stage.RENEWED): _AFTER_STEP,
    (ScalerUnscale, Stage.UNSCALED): (
        "unscale_() has already been called for this optimizer since the last update()",
        "call it once per step",
    ),
    (ScalerUnscale, Phase.IDLE): _NOTHING_SCALED,
    (ScalerUnscale, Phase.UPDATED): _NOTHING_SCALED,
    (ScalerUnscale, _BEFORE_USE): _NOTHING_SCALED,
    (ScalerStep, Stage.STEPPED): _TWICE,
    (ScalerStep, Stage.RENEWED): _TWICE,
    (ScalerStep, Phase.IDLE): (
        "step() runs after the gradients of this iteration were zeroed",
        "call zero_grad() after the step, or before backward",
    ),
    (ScalerStep, _BEFORE_USE): (f"step() runs {_BEFORE_USE}", "call it after backward on a scaled loss"),
    (ScalerUpdate, Phase.UPDATED): (
        "update() runs again, although no optimizer has been stepped since the last one",
        "call it once per iteration, after the steps",
    ),
    (ScalerUpdate, _BEFORE_USE): (
        f"update() runs {_BEFORE_USE}",
        "call it once per iteration, after the steps",
    ),
}


@rule("AMP809", ScalerUnscale, ScalerStep)
def _misplaced(flow: Interpreter, event: ScalerUnscale | ScalerStep) -> Iterator[Mistake]:
    """A call of unscale_() or step() that the scaler refuses, or that divides the gradients once more."""
    state, target = flow.state, event.target
    if target is None or target.one_of_several or event.value.enabled is False:
        return
    unused = state.get(UNUSED, event.scaler) is True
    if isinstance(event, ScalerStep) and state.gradients != AccumulatedGradients():
        unused = False  # another scaler has scaled these
    stage = state.get(STAGE, event.scaler, target.key)
    for met in (
        stage if _is_current(flow, event) else None,
        _BEFORE_USE if unused else None,
        state.life.phase,
    ):
        if (type(event), met) in _MISPLACED:
            again = isinstance(event, ScalerUnscale) and met is Stage.UNSCALED
            fix = remove_statement(event.statement, event.node) if again else None
            yield Mistake(event.node, *_MISPLACED[type(event), met], fix)


def _is_current(flow: Interpreter, event: ScalerUnscale | ScalerStep) -> bool:
    """Return whether a stage is that of this iteration, or the scaler is updated at all."""
    updates = of_type(flow.events.values(), ScalerUpdate)
    return flow.point.is_first_iteration or any(update.scaler == event.scaler for update in updates)


@rule("AMP806", ScalerUpdate)
def _needless_update(flow: Interpreter, event: ScalerUpdate) -> Iterator[Mistake]:
    state, life = flow.state, flow.state.life
    stages = set(state.stages(event.scaler))
    if event.value.enabled is False or stages - {Stage.UNSCALED}:
        return
    unused = state.get(UNUSED, event.scaler) is True
    is_own = life.scaler == event.scaler and not stages and event.needs_step
    for met in (life.phase if is_own else None, _BEFORE_USE if unused else None):
        if (ScalerUpdate, met) in _MISPLACED:
            yield Mistake(event.node, *_MISPLACED[ScalerUpdate, met])


@rule("AMP806", ScalerStep, ScalerUnscale, Backward)
def _early_update(flow: Interpreter, event: ScalerStep | ScalerUnscale | Backward) -> Iterator[Mistake]:
    """An update between the first scaled backward and the last step.

    After unscale_(), which looks for infinities, a script may skip the step and call update() at once.
    """
    life, line = flow.state.life, line_of(event.node)
    if isinstance(event, Backward):
        what = f"the backward at line {line}, whose loss has another scale"
        is_scaled = event.loss.scaler_key != UNSCALED
    else:
        name = "the step" if isinstance(event, ScalerStep) else "unscale_()"
        what = f"{name} at line {line}, which then divides by another scale"
        is_scaled = event.value.enabled is not False and event.target is not None
    is_early = life.phase is Phase.EARLY or (life.phase is Phase.LOOKED and isinstance(event, ScalerStep))
    if life.update is None or not is_scaled:
        return
    if is_early:
        cause, advice = f"update() runs before {what}", "call update() once per iteration, after every step"
        yield Mistake(life.update, cause, advice)
    elif life.phase is Phase.UPDATED and isinstance(event, ScalerStep) and life.scaler == event.scaler:
        yield Mistake(
            life.update,
            "update() runs between the steps of several optimizers, whose gradients share one scale",
            "call update() once, after the steps of all optimizers",
        )


@rule("AMP812", Backward)
def _added_to_unscaled(flow: Interpreter, event: Backward) -> Iterator[Mistake]:
    state, scaler = flow.state, event.loss.scaler_key
    stages = state.stages(scaler)
    is_unscaled = bool(stages) and all(stage is Stage.UNSCALED for stage in stages)
    if scaler in (UNSCALED, MAYBE) or not has_single_optimizer(flow):
        return
    if state.gradients.known and (is_unscaled or state.life.phase is Phase.LOOKED):
        yield Mistake(
            event.node,
            "scaled gradients are added to gradients that have already been unscaled",
            "call unscale_() once, after the last backward before the step",
        )


@rule("AMP812", EntryPointFollowed)
def _never_zeroed(flow: Interpreter, entry: EntryPointFollowed) -> Iterator[Mistake]:
    steps = of_type(entry.events, StepEvent)
    if not steps or of_type(entry.events, ZeroGrad, UnknownEffect):
        return
    if flow.linked.mentions("zero_", "clear", "reset") or flow.linked.uses_name("grad"):
        return
    for event in of_type(entry.events, Backward):
        loops = [guard.node for guard in event.guards if guard.kind == "loop"]
        around = [step for step in steps if any(step.is_inside(loop) for loop in loops)]
        is_scaled = event.loss.scaler_key not in (UNSCALED, MAYBE)
        if around and (is_scaled or of_type(around, ScalerStep)):
            yield Mistake(
                event.node,
                "nothing zeroes the gradients: this backward adds scaled gradients to those that the step of "
                "the iteration before has unscaled",
                "call optimizer.zero_grad() after each step",
                certainty=Certainty.LIKELY,
            )


@rule("AMP817", OptimizerStep)
def _second_step(flow: Interpreter, event: OptimizerStep) -> Iterator[Mistake]:
    if event.optimizer and flow.state.life.stepped == event.optimizer:
        yield Mistake(
            event.node,
            "the scaler has already stepped this optimizer; this second step also runs after an overflow",
            "remove it: scaler.step(optimizer) calls optimizer.step()",
            remove_statement(event.statement, event.node),
        )


_OVERFLOWS: Final = ("found_inf", "check_inf", "overflow")
_TESTS_FINITE: Final = ("isfinite", "isinf", "isnan")


@rule("AMP803", OptimizerStep)
def _bypassed_scaler(flow: Interpreter, event: OptimizerStep) -> Iterator[Mistake]:
    """A step with gradients of a scaled loss that the scaler should take."""
    state, node = flow.state, event.node
    if event.optimizer and state.life.stepped == event.optimizer:
        return  # AMP817
    is_single, contributions = has_single_optimizer(flow), state.gradients.known or frozenset()
    is_scaled = any(item.scaler for item in contributions)
    stages = {stage for key, stage in state.matching(STAGE) if is_single or key[1] == event.optimizer}
    is_still_scaled = not set(state.stages()) - {Stage.RENEWED}
    if is_scaled and is_still_scaled and (is_single or len(contributions) == 1):
        cause = "the optimizer steps with scaled gradients, and nothing skips the step if they overflow"
    elif (Stage.UNSCALED in stages or (is_scaled and PERHAPS in stages)) and _overflow_is_unchecked(flow):
        cause = "the step bypasses the scaler: nothing skips it if the gradients have overflowed"
    else:
        return
    scaler = scaler_in_scope(flow.point.script, node)
    function = node.func if isinstance(node, ast.Call) else None
    optimizer = ast.unparse(function.value) if isinstance(function, ast.Attribute) else "optimizer"
    fix = Fix.at(node, "step by scaler", scaler) if scaler else None
    advice = f"write {scaler or 'scaler'}.step({optimizer})"
    if not flow.scalers:
        advice = "prepare the optimizer with the framework as well, whose step unscales the gradients"
    yield Mistake(node, cause, advice, fix)


def _overflow_is_unchecked(flow: Interpreter) -> bool:
    """Return whether gradients were unscaled, and the script does not test for overflow itself."""
    unscaled = of_type(flow.events.values(), ScalerUnscale)
    inner = len(flow.point.guards) > min((len(e.guards) for e in unscaled), default=0)
    if not unscaled or inner or flow.linked.mentions(*_OVERFLOWS):
        return False
    calls = (call for script in flow.linked.scripts for call in script.of_type(ast.Call))
    # a finite loss says nothing of the gradients
    tests = (c for c in calls if simple_name(c.func) in _TESTS_FINITE)
    return all(c.args and mentions(c.args[0], "loss") for c in tests)


@rule("AMP815", ScalerStep)
def _other_scaler(flow: Interpreter, event: ScalerStep) -> Iterator[Mistake]:
    target, contributions = event.target, flow.state.gradients.known or frozenset()
    if target is None or event.value.enabled is False:
        return
    ordered = sorted(contributions, key=lambda item: position_of(item.node))
    if flow.state.get(UNUSED, event.scaler) is True and ordered and all(item.scaler for item in ordered):
        related = [i for i in ordered if not i.models or not target.models or i.models & target.models]
        yield Mistake(
            (related or ordered)[-1].node,
            "this loss is scaled by another scaler than the one that steps at line "
            f"{line_of(event.node)}, which has scaled nothing: its step raises",
            "scale each loss by the scaler that steps its optimizer",
        )
    others = [item for item in ordered if item.scaler not in (event.scaler, UNSCALED)]
    if others and event.optimizer and has_single_optimizer(flow):
        yield Mistake(
            others[0].node,
            "this loss is scaled by another scaler than the other "
            "losses that contribute to the same gradients",
            "use one scaler for all losses of an optimizer",
        )
    for (key, optimizer), stage in flow.state.matching(STAGE):
        other = flow.scalers.get(key)
        if optimizer != target.key or key == event.scaler or other is None or stage is not Stage.UNSCALED:
            continue
        calls = [e for e in of_type(flow.events.values(), ScalerUnscale) if e.scaler == key]
        are_made_here = event.value.node is not None and other.node is not None
        for call in calls[-1:]:
            yield Mistake(
                call.node,
                "this scaler unscales the gradients of an optimizer that another one steps, at line "
                f"{line_of(event.node)}: it divides them by the wrong scale, and the step divides them again",
                "unscale with the scaler that scaled the loss and steps",
                certainty=Certainty.KNOWN if are_made_here else Certainty.LIKELY,
            )


@rule("AMP816", ScalerStep)
def _closure(_: Interpreter, event: ScalerStep) -> Iterator[Mistake]:
    if event.has_closure and event.target is not None and event.value.enabled is not False:
        yield Mistake(
            event.node,
            "the scaler does not support an optimizer that recomputes the loss in a closure",
            "use an optimizer without a closure, or train in bfloat16 or float32 without a scaler",
        )
