"""The facts of a state that are about gradients.

``grads`` is the set of backward passes in ``.grad``. Per scaler and optimizer, ``unscaled`` and ``stepped``
say what was done since the last update. Per scaler, ``updated`` is the update since which nothing was
backpropagated, ``early`` an update that came before the step, ``unused`` that nothing was scaled yet.
``fresh`` says that a backward came after the last step, ``idle`` that there are no gradients, ``leftover``
that unscaled gradients are still there after an update, ``last`` which optimizer a scaler stepped last,
``zeroed`` which zeroing threw gradients away, ``touched`` that unknown code had a scaler or an optimizer.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampaudit.lint.flow.state import NO_CONTRIBUTIONS, Contribution

if TYPE_CHECKING:
    from ampaudit.lint.flow.interpreter import Interpreter

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
    """The backward passes in ``.grad``; ``None`` where that is not certain."""
    found = interpreter.state.get("grads")
    if found is None:
        return NO_CONTRIBUTIONS
    return found if isinstance(found, frozenset) else None


def is_still_scaled(interpreter: Interpreter) -> bool:
    """Whether the gradients certainly have a loss scale in them that nothing has taken out."""
    found = gradient_contributions(interpreter)
    if not found or not all(item.scaler for item in found):
        return False
    return not interpreter.state.may_hold("unscaled")


def has_single_optimizer(interpreter: Interpreter) -> bool:
    """Whether it is certain which optimizer's gradients are meant."""
    return len(interpreter.script.usage.optimizer_names()) <= 1


def is_unscaled(interpreter: Interpreter) -> bool:
    """Whether unscale_() was called for every optimizer that anything was said of."""
    facts = [fact for _, fact in interpreter.state.matching("unscaled")]
    return bool(facts) and all(isinstance(fact, ast.AST) for fact in facts)


def clear_gradients(interpreter: Interpreter) -> None:
    """All gradients are set to zero."""
    interpreter.state.set_fact(NO_CONTRIBUTIONS, "grads")
    interpreter.state.set_fact(YES, "idle")
    interpreter.state.set_fact(None, "leftover")
