"""Rules on gradients: which losses are scaled, and what is done with gradients that still are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from ampaudit.linter.diagnostic import Fix, Mistake, line_of
from ampaudit.linter.flow.events import Clip, GradientNorm, GradientRead, OptimizerStep, ScalerStep
from ampaudit.linter.flow.gradients import has_single_optimizer
from ampaudit.linter.flow.interpreter import Interpreter
from ampaudit.linter.flow.state import STAGE, item_of
from ampaudit.linter.flow.statement_context import (
    call_beside_scaler,
    in_same_function,
    location_suffix,
    nodes_around,
    step_beside,
)
from ampaudit.linter.flow.syntax import mentions, receiver_name
from ampaudit.linter.flow.tensors import dtype_of_model_calls
from ampaudit.linter.flow.torch_names import FRAMEWORKS, MANAGING_PACKAGES
from ampaudit.linter.flow.values import MAYBE, UNKNOWN, UNSCALED, Call, Parameters, ScaleReading
from ampaudit.linter.rules.constants import number_of
from ampaudit.linter.rules.rule import rule


@rule("AMP802", ScalerStep)
def _unscaled_loss(flow: Interpreter, event: ScalerStep) -> Iterator[Mistake]:
    contributions, step = flow.state.gradients.known or frozenset(), event.node
    is_mixed = any(item.scaler for item in contributions)
    if event.target is None or event.value.enabled is False or (is_mixed and not has_single_optimizer(flow)):
        return
    for node in (item.node for item in contributions if not item.scaler):
        is_beside = isinstance(step, ast.Call) and in_same_function(flow.linked, step, node)
        text = receiver_name(step) if is_beside and isinstance(step, ast.Call) else ""
        function = node.func if isinstance(node, ast.Call) else None
        owner = function.value if isinstance(function, ast.Attribute) else None
        is_named = text != "" and isinstance(owner, ast.Name | ast.Attribute)
        yield Mistake(
            node,
            "backward runs on the unscaled loss, but the scaler divides the gradients by the scale",
            f"write {text or 'scaler'}.scale(loss).backward()",
            # the other backward may be of the same loss
            Fix.at(node, "scale loss", text) if is_named and not is_mixed else None,
        )


@rule("AMP813", OptimizerStep)
def _without_scale(flow: Interpreter, event: OptimizerStep) -> Iterator[Mistake]:
    contributions, scripts = flow.state.gradients.known or frozenset(), flow.linked.scripts
    is_second = event.optimizer != "" and flow.state.life.stepped == event.optimizer
    if flow.managed or is_second or any(item.scaler for item in contributions):
        return
    if any(s.scales_losses or any(n.startswith(MANAGING_PACKAGES) for n in s.imports) for s in scripts):
        return
    for item in contributions:
        by_autocast = item.computed_under or dtype_of_model_calls(flow)
        if (by_autocast or flow.sharded_dtype) == "float16":
            how = "under float16 autocast" if by_autocast else "by FSDP in float16"
            yield Mistake(
                item.node,
                f"the loss is computed {how} without a loss scale: small gradients become zero",
                'scale the loss with torch.amp.GradScaler("cuda"), or use dtype=torch.bfloat16',
            )


def _are_distinct(models: frozenset[str], others: frozenset[str]) -> bool:
    """Return whether none of some models can be one of others, or a part of one.

    Two names may stand for one model; the key of a part has that of the call that makes the whole.
    """
    pairs = [pair for one in models for other in others for pair in ((one, other), (other, one))]
    is_part = any(f" from {whole.partition(' ')[0]}" in part for part, whole in pairs)
    return not models & others and not is_part and not any(k.startswith("name ") for k in models | others)


_NO_LIMIT: Final = 1e8  # which no gradient reaches, even scaled


@rule("AMP807", Clip)
def _clipped_scaled(flow: Interpreter, event: Clip) -> Iterator[Mistake]:
    state, node = flow.state, event.node
    still = state.gradients.scaled if _others_unscaled(flow, event.call) else state.still_scaled
    limit = event.call.expression(1, "max_norm") or node
    is_off = any((number_of(part) or 0) >= _NO_LIMIT for part in ast.walk(limit))
    # a limit that has the scale as well is right
    has_scale = isinstance(event.call.get(1, "max_norm"), ScaleReading)
    if has_scale or is_off or not min(still, event.certainty):
        return
    place = call_beside_scaler(flow.linked, node, flow.calls)
    fix, statement = None, event.statement
    step = step_beside(flow.point.script, node)
    if place is node and step and isinstance(statement, ast.Expr | ast.Assign | ast.AugAssign):
        fix = Fix.at(statement, "insert before", f"{step[0]}.unscale_({step[1]})")
    yield Mistake(
        place,
        f"the gradients are clipped{location_suffix(node, place)} while they are still scaled by the "
        "loss scale",
        _advice_of_framework(flow, clips=True)
        or "call scaler.unscale_(optimizer) and clip right before scaler.step(optimizer)",
        fix,
        min(still, event.certainty),
    )


def _others_unscaled(flow: Interpreter, call: Call) -> bool:
    """Return whether only optimizers of other models than the clipped ones were unscaled."""
    parameters = call.get(0, "parameters")
    models = parameters.models if isinstance(parameters, Parameters) else None
    stages = flow.state.matching(STAGE)
    unscaled = [flow.models_by_optimizer.get(key[1]) for key, stage in stages if stage is not None]
    return bool(models) and all(keys is not None and _are_distinct(keys, models or keys) for keys in unscaled)


def _advice_of_framework(flow: Interpreter, *, clips: bool) -> str:
    """Return what to call before a use of the gradients if a framework has scaled them, else nothing."""
    scalers = {item.scaler for item in flow.state.gradients.contributions}
    for framework in FRAMEWORKS:
        if f"managed by {framework.name}" in scalers:
            return f"call {framework.clip if clips else framework.unscale or framework.clip}"
    return ""


@rule("AMP871", Clip)
def _clipped_shards(flow: Interpreter, event: Clip) -> Iterator[Mistake]:
    parameters = item_of(event.call.get(0, "parameters") or UNKNOWN)
    models = parameters.models if isinstance(parameters, Parameters) else None
    tests = [guard.node.test for guard in flow.point.guards if isinstance(guard.node, ast.If)]
    has_alternative = any(mentions(test, "clip_grad_norm_") for test in tests)
    if not models or has_alternative or not event.function.startswith("torch."):
        return
    if models & flow.sharded - flow.replicated:
        yield Mistake(
            event.node,
            "FSDP shards the gradients: each process clips its shards by their own norm, and not by that of "
            "the whole gradient",
            "call model.clip_grad_norm_(max_norm), which FSDP adds up over all processes",
        )


def _cancels_scale(node: ast.AST) -> bool:
    """Return whether an expression divides by the scale, or a gradient or a step along it by a norm."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
        return False
    by_norm = mentions(node.left, *_ALONG_GRADIENT) and mentions(node.right, "norm")
    return by_norm or mentions(node.right, "scale")


_ALONG_GRADIENT: Final = ("grad", "rho", "radius", "epsilon")


@rule("AMP808", GradientRead)
def _read_scaled(flow: Interpreter, event: GradientRead) -> Iterator[Mistake]:
    """A use of gradients that are still scaled, at the first of several in a line."""
    node, certainty = event.node, flow.state.still_scaled
    if event.is_copy or not certainty or isinstance(event.statement, ast.Assert):
        return
    place = call_beside_scaler(flow.linked, node, flow.calls)
    if any(_cancels_scale(part) for each in {node, place} for part in nodes_around(flow.linked, each)):
        return
    if not any(key[:2] == ("AMP808", line_of(place)) for key in flow.diagnostics):
        yield Mistake(
            place,
            f"the gradients used{location_suffix(node, place, 'here')} are still scaled by the loss scale",
            _advice_of_framework(flow, clips=False)
            or "call scaler.unscale_(optimizer) once, before the gradients are first used",
            certainty=certainty,
        )


@rule("AMP837", GradientNorm)
def _scaled_penalty(flow: Interpreter, event: GradientNorm) -> Iterator[Mistake]:
    gradients, node = event.gradients, event.node
    if gradients.scaler_key not in (UNSCALED, MAYBE):
        places = (node, *reversed(flow.calls))  # the norm, or the call of a helper that is given them
        place = next((p for p in places if in_same_function(flow.linked, p, gradients.node)), node)
        yield Mistake(
            place,
            f"these gradients{location_suffix(node, place)} are scaled by the loss scale, "
            "so the penalty measures the scale and not the model",
            "multiply them by 1 / scaler.get_scale() first",
        )
