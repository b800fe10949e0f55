"""A callback for Transformers' ``Trainer`` that records the health of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ampaudit.training.callbacks import HealthRecorder

__all__ = ["TransformersHealthCallback"]


class TransformersHealthCallback(HealthRecorder, TrainerCallback):
    """Records the health of a run: ``Trainer(callbacks=[TransformersHealthCallback("health.json")])``.

    Args:
        path: of the JSON report; ``None`` writes none.
        every: measure one step in this many.
        dtype: the 16-bit format that is asked about.
        scaler: Accelerate's, ``trainer.accelerator.scaler``, if there is one: then skipped steps are seen.
    """

    def __init__(
        self,
        path: Path | str | None = None,
        *,
        every: int = 10,
        dtype: str = "float16",
        scaler: Any = None,
    ) -> None:
        super().__init__(path, every=every, dtype=dtype)
        self._scaler = scaler

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start recording with the Trainer's model and optimizer."""
        self._start(kwargs["model"], kwargs["optimizer"], self._scaler)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop, collect the logged losses, and write the report."""
        if self._monitor is None:
            return
        for entry in state.log_history:
            if "loss" in entry:
                self._monitor.loss(float(entry["loss"]), step=int(entry["step"]) - 1)
        self._stop(save=state.is_world_process_zero)
