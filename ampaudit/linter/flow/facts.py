"""The kinds of facts about scalers, optimizers and models that a state holds, each with its values."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, Literal, TypeVar

__all__ = [
    "BFLOAT16_WEIGHTS",
    "CAST_BY_DTYPE",
    "DEVICE",
    "FRESH",
    "FROZEN",
    "HALF_WEIGHTS",
    "HALVED_IN_LOOP",
    "IDLE",
    "LEFTOVER",
    "PERHAPS",
    "STEPPED",
    "STEPPED_LAST",
    "TOUCHED",
    "UNSCALED_AT",
    "UNUSED",
    "UPDATED",
    "UPDATED_EARLY",
    "EarlyUpdate",
    "FactKind",
    "Perhaps",
    "PerhapsHalf",
    "Stepped",
]

T = TypeVar("T")


class Perhaps(Enum):
    """The value of a fact that differs between the paths that lead here."""

    PERHAPS = 0


PERHAPS: Final = Perhaps.PERHAPS


class Stepped(Enum):
    """How an optimizer was stepped."""

    BY_SCALER = 0
    PAST_SCALER = 1


@dataclass(frozen=True, slots=True)
class EarlyUpdate:
    """An update before the step; ``looked`` if ``unscale_`` has looked for infinities before it."""

    node: ast.AST
    looked: bool


@dataclass(frozen=True, slots=True)
class PerhapsHalf:
    """A cast of a model to a dtype that a setting chooses, and that may be float16."""

    node: ast.AST


@dataclass(frozen=True, eq=False)  # Generic sets an attribute of its own
class FactKind(Generic[T]):
    """A kind of fact; a fact of it has a value, is ``PERHAPS``, or is absent or ``None`` if it is false."""

    name: str


# per scaler and optimizer, what was done since the last update: the call of unscale_, or that the step did it
UNSCALED_AT: Final = FactKind[ast.AST | Stepped]("unscaled at")
STEPPED: Final = FactKind[Stepped]("stepped")
# per scaler
UPDATED: Final = FactKind[ast.AST]("updated")  # the last update, if no backward followed
UPDATED_EARLY: Final = FactKind[EarlyUpdate]("updated early")
UNUSED: Final = FactKind[Literal[True]]("unused")  # nothing was scaled so far
# of the gradients
FRESH: Final = FactKind[Literal[True]]("fresh")  # a backward followed the last step
IDLE: Final = FactKind[Literal[True]]("idle")  # there are none
LEFTOVER: Final = FactKind[Literal[True]]("leftover")  # unscaled ones remain after an update
STEPPED_LAST: Final = FactKind[str]("stepped last")  # the optimizer that a scaler stepped last
TOUCHED: Final = FactKind[Literal[True]]("touched")  # unknown code had access to a scaler or an optimizer
# per model
HALF_WEIGHTS: Final = FactKind[ast.AST | PerhapsHalf]("half")  # what has cast its parameters to float16
BFLOAT16_WEIGHTS: Final = FactKind[ast.AST]("bfloat16")  # the same to bfloat16
FROZEN: Final = FactKind[Literal[True]]("frozen")  # its parameters require no gradients
HALVED_IN_LOOP: Final = FactKind[ast.AST]("halved in loop")  # a cast to float16 in only some iterations
DEVICE: Final = FactKind[str]("device")

CAST_BY_DTYPE: Final[dict[str, FactKind[Any]]] = {"float16": HALF_WEIGHTS, "bfloat16": BFLOAT16_WEIGHTS}
