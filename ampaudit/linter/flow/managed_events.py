"""Events of objects that a framework manages."""

from __future__ import annotations

from dataclasses import dataclass

from ampaudit.linter.flow.events import Event
from ampaudit.linter.flow.values import Managed, Value

__all__ = [
    "ManagedBackward",
    "ManagedClip",
    "ManagedStep",
    "ManagedUpdate",
    "ManagedZeroGrad",
]


@dataclass(frozen=True, slots=True)
class ManagedEvent(Event):
    """A call of an object that a framework manages."""

    managed: Managed


@dataclass(frozen=True, slots=True)
class ManagedBackward(ManagedEvent):
    """A call of its backward pass."""

    loss: Value | None


@dataclass(frozen=True, slots=True)
class ManagedClip(ManagedEvent):
    """A call that clips the gradients."""


@dataclass(frozen=True, slots=True)
class ManagedStep(ManagedEvent):
    """A step of its optimizer."""


@dataclass(frozen=True, slots=True)
class ManagedZeroGrad(ManagedEvent):
    """A call that zeroes the gradients."""


@dataclass(frozen=True, slots=True)
class ManagedUpdate(ManagedEvent):
    """An update of its scaler."""
