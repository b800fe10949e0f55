"""A Lightning callback that records the health of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from ampaudit.training.callbacks import HealthRecorder

__all__ = ["LightningHealthCallback"]


class LightningHealthCallback(HealthRecorder, Callback):
    """Records the health of a run: ``Trainer(callbacks=[LightningHealthCallback("health.json")])``."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start recording with the first optimizer and the precision plugin's scaler."""
        self._start(pl_module, trainer.optimizers[0], getattr(trainer.precision_plugin, "scaler", None))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss of the step that has just ended."""
        del trainer, pl_module, batch, batch_idx
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._monitor is not None and self._monitor.step and isinstance(loss, torch.Tensor):
            self._monitor.loss(loss, step=self._monitor.step - 1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop, and write the report."""
        del pl_module
        self._stop(save=trainer.is_global_zero)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop without a report."""
        del trainer, pl_module, exception
        self._stop(save=False)
