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
    """Its backward pass."""

    loss: Value | None


@dataclass(frozen=True, slots=True)
class ManagedClip(ManagedEvent):
    """Its clipping."""


@dataclass(frozen=True, slots=True)
class ManagedStep(ManagedEvent):
    """Its step."""


@dataclass(frozen=True, slots=True)
class ManagedZeroGrad(ManagedEvent):
    """Its zeroing."""


@dataclass(frozen=True, slots=True)
class ManagedUpdate(ManagedEvent):
    """The update of its scaler."""
