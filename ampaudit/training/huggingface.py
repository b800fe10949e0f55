"""A callback for Transformers' ``Trainer`` that records the health of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ampaudit.report.training import Health
from ampaudit.training.watch import TrainingMonitor, watch

__all__ = ["TransformersHealthCallback"]


class TransformersHealthCallback(TrainerCallback):
    """Records the health of a Trainer's run, and writes the report at its end.

    Args:
        path: of the JSON report; ``None`` writes none.
        every: watch one step of so many.
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
        self._path, self._every, self._dtype, self._scaler = path, every, dtype, scaler
        self._watch: TrainingMonitor | None = None

    @property
    def health(self) -> Health | None:
        """What was seen so far."""
        return None if self._watch is None else self._watch.health()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin, with the Trainer's model and the optimizer inside Accelerate's."""
        optimizer = kwargs["optimizer"]
        optimizer = getattr(optimizer, "optimizer", optimizer)
        self._watch = watch(kwargs["model"], optimizer, self._scaler, every=self._every, dtype=self._dtype)
        self._watch.__enter__()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop, take the losses that were logged, and write the report."""
        if self._watch is None:
            return
        self._watch.__exit__(None, None, None)
        for entry in state.log_history:
            if "loss" in entry:
                self._watch.tell(int(entry["step"]) - 1, float(entry["loss"]))
        if self._path is not None and state.is_world_process_zero:
            self._watch.save(self._path, force=True)
