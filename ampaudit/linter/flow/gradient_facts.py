"""Queries on the facts about gradients in a state.

- ``grads``: the backward passes whose gradients are in ``.grad``
- ``unscaled``, ``stepped``, per scaler and optimizer: what was done since the last update
- ``updated``, per scaler: the last update, if no backward followed
- ``early``, per scaler: an update before the step
- ``unused``, per scaler: nothing was scaled so far
- ``fresh``: a backward followed the last step
- ``idle``: there are no gradients
- ``leftover``: unscaled gradients remain after an update
- ``last``: the optimizer that a scaler stepped last
- ``zeroed``: the zeroing that discarded gradients
- ``touched``: unknown code had access to a scaler or an optimizer
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampaudit.linter.flow.state import NO_CONTRIBUTIONS, Contribution

if TYPE_CHECKING:
    from ampaudit.linter.flow.interpreter import Interpreter

__all__ = [
    "BYPASSED",
    "BY_STEP",
    "YES",
    "clear_gradients",
    "gradient_contributions",
    "has_single_optimizer",
    "is_still_scaled",
    "is_unscaled",
]


YES = "yes"


BYPASSED = "past the scaler"


BY_STEP = "by step"


def gradient_contributions(interpreter: Interpreter) -> frozenset[Contribution] | None:
    """Return the backward passes in ``.grad``; ``None`` if that is not certain."""
    found = interpreter.state.get("grads")
    if found is None:
        return NO_CONTRIBUTIONS
    return found if isinstance(found, frozenset) else None


def is_still_scaled(interpreter: Interpreter) -> bool:
    """Return whether all gradients are certainly scaled."""
    found = gradient_contributions(interpreter)
    if not found or not all(item.scaler for item in found):
        return False
    return not interpreter.state.may_hold("unscaled")


def has_single_optimizer(interpreter: Interpreter) -> bool:
    """Return whether the script has at most one optimizer."""
    return len(interpreter.script.usage.optimizer_names()) <= 1


def is_unscaled(interpreter: Interpreter) -> bool:
    """Return whether unscale_() was called for every optimizer with a fact about it."""
    facts = [fact for _, fact in interpreter.state.matching("unscaled")]
    return bool(facts) and all(isinstance(fact, ast.AST) for fact in facts)


def clear_gradients(interpreter: Interpreter) -> None:
    """Set the facts after all gradients were zeroed."""
    interpreter.state.set_fact(NO_CONTRIBUTIONS, "grads")
    interpreter.state.set_fact(YES, "idle")
    interpreter.state.set_fact(None, "leftover")
