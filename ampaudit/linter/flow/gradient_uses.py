"""Interprets uses of gradients: ``p.grad``, and those of ``torch.autograd.grad``."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Final

from ampaudit.linter.diagnostic import Certainty, line_of
from ampaudit.linter.flow.events import GradientRead, UnknownEffect
from ampaudit.linter.flow.facts import FRESH, IDLE, LEFTOVER, UNSCALED_AT, UNUSED, UPDATED
from ampaudit.linter.flow.state import UNKNOWN_GRADIENTS, AccumulatedGradients, Contribution
from ampaudit.linter.flow.statement_context import (
    call_beside_scaler,
    in_same_function,
    location_suffix,
    nodes_around,
)
from ampaudit.linter.flow.torch_names import FRAMEWORKS
from ampaudit.linter.flow.values import (
    MAYBE,
    UNSCALED,
    UNSCALED_TENSOR,
    GradAttribute,
    LossGradients,
    Tensor,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = [
    "NORM_FUNCTIONS",
    "advice_for",
    "are_distinct",
    "clear_gradients",
    "gradient_contributions",
    "gradient_method",
    "gradient_norm",
    "has_single_optimizer",
    "is_unscaled",
    "replace_gradients",
    "still_scaled",
    "use_gradient",
]


NORM_FUNCTIONS: Final = frozenset({"norm", "pow", "square", "sum", "abs", "pow_"})


# the gradient itself, or a multiple of it: the scale can be taken out afterwards as well
_KEEPS_GRADIENT: Final = frozenset(
    "detach contiguous view reshape flatten cpu clone float double to mul mul_ div div_".split()
)


_HARMLESS_ON_GRADIENTS: Final = frozenset(
    "isnan isinf isfinite zero_ fill_ detach_ requires_grad_ size numel dim is_contiguous untyped_storage"
    " data_ptr any all is_sparse type record_stream".split()
)


def gradient_norm(interpreter: Interpreter, node: ast.AST, gradients: LossGradients) -> Value:
    """Interpret a norm or power of gradients, as in a gradient penalty."""
    if gradients.scaler_key not in (UNSCALED, MAYBE):
        places = (node, *reversed(interpreter.calls))  # the norm, or the call of a helper that is given them
        place = next((p for p in places if in_same_function(interpreter.linked, p, gradients.node)), node)
        interpreter.report(
            "AMP837",
            place,
            f"these gradients{location_suffix(node, place)} are scaled by the loss scale, "
            "so the penalty measures the scale and not the model",
            "multiply them by 1 / scaler.get_scale() first",
        )
    return Tensor(scaler_key=gradients.scaler_key, node=node)


def use_gradient(interpreter: Interpreter, node: ast.AST) -> None:
    """Record that ``p.grad`` is read, and report it if it is still scaled."""
    interpreter.record(GradientRead(interpreter.at(node)))
    certainty = still_scaled(interpreter)
    if _is_normalized(interpreter, node) or isinstance(interpreter.statement, ast.Assert):
        return
    place = call_beside_scaler(interpreter.linked, node, interpreter.calls)
    line = line_of(place)
    if certainty and not any(key[:2] == ("AMP808", line) for key in interpreter.diagnostics):
        interpreter.report(
            "AMP808",
            place,
            f"the gradients used{location_suffix(node, place, 'here')} are still scaled by the loss scale",
            advice_for(interpreter, "read")
            or "call scaler.unscale_(optimizer) once, before the gradients are first used",
            certainty=certainty,
        )


def _is_normalized(interpreter: Interpreter, node: ast.AST) -> bool:
    """Return whether the function around a node divides the gradients by their norm: the scale cancels."""
    texts = (ast.unparse(n) for n in nodes_around(interpreter.linked, node) if isinstance(n, ast.BinOp))
    return any(_BY_NORM.search(text) for text in texts)


_BY_NORM: Final = re.compile(r"(?:grad|rho|radius|epsilon).* / \(?\w*norm")


def gradient_method(interpreter: Interpreter, node: ast.Call, name: str) -> Value:
    """Interpret a method of ``p.grad``."""
    if name in _KEEPS_GRADIENT:
        interpreter.record(GradientRead(interpreter.at(node)))
        return GradAttribute()
    if name not in _HARMLESS_ON_GRADIENTS:
        use_gradient(interpreter, node)
    return UNSCALED_TENSOR


def gradient_contributions(interpreter: Interpreter) -> frozenset[Contribution] | None:
    """Return the backward passes in ``.grad``; ``None`` if that is not known."""
    gradients = interpreter.state.gradients
    return gradients.contributions if gradients.certainty == Certainty.KNOWN else None


def still_scaled(interpreter: Interpreter) -> Certainty:
    """Return how certain it is that all gradients are scaled."""
    gradients = interpreter.state.gradients
    scaled = gradients.contributions and all(item.scaler for item in gradients.contributions)
    return (
        gradients.certainty if scaled and not interpreter.state.may_hold(UNSCALED_AT) else Certainty.UNKNOWN
    )


def advice_for(interpreter: Interpreter, use: str) -> str:
    """Return what to call for a use of the gradients if a framework has scaled them, else nothing."""
    scalers = {item.scaler for item in interpreter.state.gradients.contributions}
    framework = next((one for one in FRAMEWORKS if f"managed by {one.name}" in scalers), None)
    if framework is None:
        return ""
    return f"call {framework.clip if use == 'clip' else framework.unscale or framework.clip}"


def are_distinct(models: frozenset[str], others: frozenset[str]) -> bool:
    """Return whether none of some models can be one of others; two names may stand for one model."""
    return not models & others and not any(key.startswith("name ") for key in models | others)


def has_single_optimizer(interpreter: Interpreter) -> bool:
    """Return whether the script has at most one optimizer."""
    scripts = (interpreter.script, interpreter.linked.main)
    return all(len(script.usage.optimizer_names()) <= 1 for script in scripts)


def is_unscaled(interpreter: Interpreter) -> bool:
    """Return whether unscale_() was called for every optimizer with a fact about it."""
    facts = [fact for _, fact in interpreter.state.matching(UNSCALED_AT)]
    return bool(facts) and all(isinstance(fact, ast.AST) for fact in facts)


def replace_gradients(interpreter: Interpreter, node: ast.AST) -> None:
    """Set the facts after ``p.grad = ...``, which may be of any scale."""
    interpreter.record(UnknownEffect(interpreter.at(node)))
    interpreter.state.gradients = UNKNOWN_GRADIENTS
    interpreter.state.invalidate(IDLE, FRESH, UNUSED, UPDATED, LEFTOVER)


def clear_gradients(interpreter: Interpreter) -> None:
    """Set the facts after all gradients were zeroed."""
    interpreter.state.gradients = AccumulatedGradients()
    interpreter.state.set_fact(IDLE, True)
    interpreter.state.set_fact(LEFTOVER, None)
