"""A Lightning callback that records the health of a run."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from ampaudit.training.callbacks import HealthRecorder

__all__ = ["LightningHealthCallback"]


class LightningHealthCallback(HealthRecorder, Callback):
    """Records the health of a run: ``Trainer(callbacks=[LightningHealthCallback("health.json")])``.

    It watches every optimizer of the module, in automatic and manual optimization; the loss of a step is
    what was backpropagated for it. The numbers of the last watched step are logged by the module's own
    ``log`` as ``ampaudit/...``, so they reach the trainer's loggers and callbacks.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start recording with the optimizers and the precision plugin's scaler."""
        self._scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        self._backpropagated: list[torch.Tensor] = []
        self._stepped = False
        self._start(pl_module, trainer.optimizers, self._scaler)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Add a loss to those of the next step."""
        del trainer, pl_module
        if self._stepped:
            self._backpropagated.clear()
            self._stepped = False
        scaled = self._scaler is not None and self._scaler.is_enabled()
        loss = loss.detach()
        self._backpropagated.append(loss / self._scaler._scale if scaled else loss.clone())

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Record the loss of a step that is about to be taken."""
        del trainer, pl_module
        if self._monitor is not None and self._backpropagated:
            loss = torch.stack([loss.reshape(()) for loss in self._backpropagated]).sum()
            self._monitor.loss(loss, step=self._monitor.step_of(optimizer), optimizer=optimizer)
        self._stepped = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the numbers of the last watched step."""
        del trainer, outputs, batch, batch_idx
        pl_module.log_dict(self._latest(), batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop, and write the report."""
        del pl_module
        self._stop(save=trainer.is_global_zero)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop, and write what was recorded until then."""
        del pl_module, exception
        self._stop(save=trainer.is_global_zero)
