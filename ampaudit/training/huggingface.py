"""A callback for Transformers' ``Trainer`` that records the health of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ampaudit.core.formats import Dtype
from ampaudit.training.callbacks import HealthRecorder


class TransformersHealthCallback(HealthRecorder, TrainerCallback):
    """Record the health of a run: ``Trainer(callbacks=[TransformersHealthCallback("health.json")])``.

    The Trainer logs the mean loss of ``logging_steps`` steps; that mean is recorded for each of them.

    A callback does not know its trainer. With ``trainer.add_callback(TransformersHealthCallback(...,
    trainer=trainer))``, the trainer also logs the numbers of the last watched step as ``ampaudit/...``, so
    they reach whatever ``report_to`` names.

    Args:
        path: File of the JSON report; ``None`` writes none.
        every: Interval of measured steps.
        dtype: 16-bit format to judge the run by; by default the trainer's.
        scaler: Loss scaler; by default Accelerate's, if there is one.
        trainer: Trainer that logs the numbers.
    """

    def __init__(
        self,
        path: Path | str | None = None,
        *,
        every: int = 10,
        dtype: Dtype | None = None,
        scaler: Any = None,
        trainer: Any = None,
    ) -> None:
        super().__init__(path, every=every, dtype=dtype)
        self._scaler, self._trainer = scaler, trainer
        self._first_step = self._logged = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start recording with the Trainer's model and optimizer."""
        self._first_step = self._logged = state.global_step  # of a resumed run
        trained_in = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
        self._start(kwargs["model"], kwargs["optimizer"], self._scaler, trained_in)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the Trainer's loss for each step since the last log, and log our numbers beside it."""
        logs = kwargs.get("logs") or {}
        if self._monitor is None or "loss" not in logs or state.global_step <= self._first_step:
            return
        for step in range(self._logged, state.global_step):
            self._monitor.loss(float(logs["loss"]), step=step - self._first_step)
        self._logged = state.global_step
        latest = {name: float(value) for name, value in self._latest().items()}
        if self._trainer is not None and latest:
            self._trainer.log(latest)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop, and write the report."""
        self._stop(save=state.is_world_process_zero)
