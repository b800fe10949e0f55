"""The shared part of callbacks that record the health of a run in another library's trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ampaudit.report.training import Health
from ampaudit.training.watch import TrainingMonitor, watch

__all__ = ["HealthRecorder"]


class HealthRecorder:
    """Records a run from start to end, and writes the report.

    Args:
        path: of the JSON report; ``None`` writes none.
        every: measure one step in this many.
        dtype: the 16-bit format that is asked about.
    """

    def __init__(self, path: Path | str | None = None, *, every: int = 10, dtype: str = "float16") -> None:
        self._path, self._every, self._dtype = path, every, dtype
        self._monitor: TrainingMonitor | None = None

    @property
    def health(self) -> Health | None:
        """The record so far."""
        return None if self._monitor is None else self._monitor.health()

    def _start(self, model: nn.Module, optimizer: Any, scaler: Any) -> None:
        """Watch the trainer's optimizer."""
        self._monitor = watch(model, optimizer, scaler, every=self._every, dtype=self._dtype)

    def _stop(self, *, save: bool) -> None:
        """Remove the hooks, and write the report if requested."""
        if self._monitor is not None:
            self._monitor.close()
            if save and self._path is not None:
                self._monitor.save(self._path, force=True)
