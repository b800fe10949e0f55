"""Queries on the facts about gradients in a state, and their changes."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampaudit.linter.diagnostic import Certainty
from ampaudit.linter.flow.events import UnknownEffect
from ampaudit.linter.flow.facts import FRESH, IDLE, LEFTOVER, UNSCALED_AT, UNUSED, UPDATED, ZEROED
from ampaudit.linter.flow.frameworks import FRAMEWORKS
from ampaudit.linter.flow.state import UNKNOWN_GRADIENTS, AccumulatedGradients, Contribution

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = [
    "advice_for",
    "are_distinct",
    "clear_gradients",
    "gradient_contributions",
    "has_single_optimizer",
    "is_unscaled",
    "replace_gradients",
    "still_scaled",
]


def gradient_contributions(interpreter: Interpreter) -> frozenset[Contribution] | None:
    """Return the backward passes in ``.grad``; ``None`` if that is not known."""
    gradients = interpreter.state.gradients
    return gradients.contributions if gradients.certainty == Certainty.KNOWN else None


def still_scaled(interpreter: Interpreter) -> Certainty:
    """Return how certain it is that all gradients are scaled."""
    found = interpreter.state.gradients
    scaled = found.contributions and all(item.scaler for item in found.contributions)
    return found.certainty if scaled and not interpreter.state.may_hold(UNSCALED_AT) else Certainty.UNKNOWN


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
    interpreter.state.invalidate(IDLE, FRESH, UNUSED, UPDATED, LEFTOVER, ZEROED)


def clear_gradients(interpreter: Interpreter) -> None:
    """Set the facts after all gradients were zeroed."""
    interpreter.state.gradients = AccumulatedGradients()
    interpreter.state.set_fact(IDLE, True)
    interpreter.state.set_fact(LEFTOVER, None)
