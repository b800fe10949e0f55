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
    "FROZEN",
    "HALF_WEIGHTS",
    "HALVED_IN_LOOP",
    "PERHAPS",
    "STAGE",
    "UNUSED",
    "FactKind",
    "Life",
    "Perhaps",
    "PerhapsHalf",
    "Phase",
    "Stage",
]

T = TypeVar("T")


class Perhaps(Enum):
    """The value of a fact that differs between the paths that lead here."""

    PERHAPS = 0


PERHAPS: Final = Perhaps.PERHAPS


class Stage(Enum):
    """What was done with an optimizer since the last update of a scaler, which keeps it as well."""

    UNSCALED = 0
    STEPPED = 1
    RENEWED = 2  # stepped, before a backward computed new gradients


class Phase(Enum):
    """What was last done with the gradients."""

    UNKNOWN = 0
    IDLE = 1  # they were zeroed
    FRESH = 2  # a backward added to them
    EARLY = 3  # and the scaler was updated before a step
    LOOKED = 4  # the same after unscale_, which looks for infinities: the step may be skipped
    STEPPED = 5  # the scaler stepped
    UPDATED = 6  # and was updated
    BYPASSED = 7  # the optimizer stepped without the scaler


@dataclass(frozen=True, slots=True)
class Life:
    """Where all gradients are between two steps.

    Attributes:
        phase: Phase.
        update: Last update of a scaler in this phase.
        scaler: Key of that scaler.
        stepped: Key of the optimizer that a scaler has stepped since the last backward.
    """

    phase: Phase = Phase.UNKNOWN
    update: ast.AST | None = None
    scaler: str = ""
    stepped: str = ""


@dataclass(frozen=True, slots=True)
class PerhapsHalf:
    """A cast of a model to a dtype that a setting chooses, and that may be float16."""

    node: ast.AST


@dataclass(frozen=True, eq=False)  # Generic sets an attribute of its own
class FactKind(Generic[T]):
    """A kind of fact; a fact of it has a value, is ``PERHAPS``, or is absent or ``None`` if it is false."""

    name: str


STAGE: Final = FactKind[Stage]("stage")  # per scaler and optimizer
UNUSED: Final = FactKind[Literal[True]]("unused")  # per scaler: nothing was scaled so far
# per model
HALF_WEIGHTS: Final = FactKind[ast.AST | PerhapsHalf]("half")  # what has cast its parameters to float16
BFLOAT16_WEIGHTS: Final = FactKind[ast.AST]("bfloat16")  # the same to bfloat16
FROZEN: Final = FactKind[Literal[True]]("frozen")  # its parameters require no gradients
HALVED_IN_LOOP: Final = FactKind[ast.AST]("halved in loop")  # a cast to float16 in only some iterations
DEVICE: Final = FactKind[str]("device")

CAST_BY_DTYPE: Final[dict[str, FactKind[Any]]] = {"float16": HALF_WEIGHTS, "bfloat16": BFLOAT16_WEIGHTS}
