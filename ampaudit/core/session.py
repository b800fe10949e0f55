"""The context of a call: what it uses besides the user's options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ampaudit.core.errors import UsageError

Progress = Callable[[str, int, int], None]


def silent(phase: str, done: int, total: int) -> None:
    """Report no progress."""


@dataclass(frozen=True, slots=True)
class Session:
    """The context of a call: progress, share of the work, backend and outputs.

    Attributes:
        on_progress: Function that receives the phase, the number of the step, and the number of steps.
        share: Share of the batches that this process runs (``run.share.Share``); ``None`` for all.
        backend: Backend that computes in 16 bits; ``None`` for the device's usual one.
        keep_outputs: Function that receives the number of each batch and its outputs in FP32 and in 16 bits.

    Raises:
        UsageError: ``on_progress`` or ``keep_outputs`` is not callable.
    """

    on_progress: Progress = silent
    share: Any = None
    backend: Any = None
    keep_outputs: Callable[[int, dict[str, Any]], None] | None = None

    def __post_init__(self) -> None:
        for name, function in (("on_progress", self.on_progress), ("keep_outputs", self.keep_outputs)):
            if function is not None and not callable(function):
                raise UsageError(f"{name} is of type {type(function).__name__}", hint="pass a function")


DEFAULT_SESSION = Session()
