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

from ampaudit.lint.flow.state import EMPTY, Contribution

if TYPE_CHECKING:
    from ampaudit.lint.flow.machine import Machine

__all__ = [
    "BY_STEP",
    "PAST",
    "YES",
    "contributions",
    "is_still_scaled",
    "is_unscaled",
    "no_gradients",
    "one_optimizer",
]


YES = "yes"


PAST = "past the scaler"


BY_STEP = "by step"


def contributions(machine: Machine) -> frozenset[Contribution] | None:
    """The backward passes in ``.grad``; ``None`` where that is not certain."""
    found = machine.live.get("grads")
    if found is None:
        return EMPTY
    return found if isinstance(found, frozenset) else None


def is_still_scaled(machine: Machine) -> bool:
    """Whether the gradients certainly have a loss scale in them that nothing has taken out."""
    found = contributions(machine)
    if not found or not all(item.scaler for item in found):
        return False
    return not machine.live.said("unscaled")


def one_optimizer(machine: Machine) -> bool:
    """Whether it is certain which optimizer's gradients are meant."""
    return len(machine.script.ducks.optimizer_names()) <= 1


def is_unscaled(machine: Machine) -> bool:
    """Whether unscale_() was called for every optimizer that anything was said of."""
    facts = [fact for _, fact in machine.live.where("unscaled")]
    return bool(facts) and all(isinstance(fact, ast.AST) for fact in facts)


def no_gradients(machine: Machine) -> None:
    """All gradients are set to zero."""
    machine.live.put(EMPTY, "grads")
    machine.live.put(YES, "idle")
    machine.live.put(None, "leftover")
