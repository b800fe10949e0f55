"""The shared part of callbacks that record the health of a run in another library's trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampaudit.core.formats import Dtype
from ampaudit.report.training import Health, TrainingReport
from ampaudit.training.watch import TrainingMonitor, watch_as


class HealthRecorder:
    """Record a run from start to end, and write the report.

    Args:
        path: File of the JSON report; ``None`` writes none.
        every: Interval of measured steps.
        dtype: 16-bit format to judge the run by; by default the trainer's.
    """

    def __init__(
        self, path: Path | str | None = None, *, every: int = 10, dtype: Dtype | None = None
    ) -> None:
        self._path, self._every, self._dtype = path, every, dtype
        self._monitor: TrainingMonitor | None = None

    @property
    def health(self) -> Health | None:
        """The record so far, of the first optimizer."""
        return None if self._monitor is None else self._monitor.health()

    @property
    def report(self) -> TrainingReport | None:
        """The report so far, with a variant per optimizer."""
        return None if self._monitor is None else self._monitor.report()

    def _start(self, model: nn.Module, optimizers: Any, scaler: Any, trained_in: str | None) -> None:
        """Watch the optimizers of a trainer; ``trained_in`` is its 16-bit format, if it has one."""
        dtype, reason = (trained_in, "the trainer's format") if self._dtype is None else (self._dtype, "")
        self._monitor = watch_as(model, optimizers, scaler, self._every, dtype, reason)

    def _latest(self) -> dict[str, float | torch.Tensor]:
        """Return the numbers of the last watched step for the trainer's loggers."""
        latest = {} if self._monitor is None else self._monitor.latest()
        return {f"ampaudit/{name}": value for name, value in latest.items()}

    def _stop(self, *, save: bool) -> None:
        """Remove the hooks, and write the report if requested."""
        if self._monitor is not None:
            self._monitor.close()
            if save and self._path is not None:
                self._monitor.save(self._path, force=True)
