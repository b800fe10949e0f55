"""A Lightning callback that records the health of a run."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from ampaudit.training.callbacks import HealthRecorder


class LightningHealthCallback(HealthRecorder, Callback):
    """Record the health of a run: ``Trainer(callbacks=[LightningHealthCallback("health.json")])``.

    Every optimizer of the module is watched, in automatic and manual optimization. The loss of a step is the
    sum of the losses that were backpropagated to its optimizer's parameters. The module's ``log`` logs the
    numbers of the last watched step as ``ampaudit/...``, so they reach the trainer's loggers and callbacks.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start recording with the optimizers and the precision plugin's scaler."""
        self._scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        self._backpropagated: list[tuple[torch.Tensor, list[int]]] = []  # losses, with prior gradient counts
        self._stepped = False
        trained_in = {"bf16": "bfloat16", "16": "float16"}.get(trainer.precision.partition("-")[0])
        self._start(pl_module, trainer.optimizers, self._scaler, trained_in)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Forget the losses of the previous step: this batch may have none."""
        self._forget()

    def _forget(self) -> None:
        if self._stepped:
            self._backpropagated.clear()
            self._stepped = False

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        """Add a loss to those of the next step."""
        self._forget()
        scaled = self._scaler is not None and self._scaler.is_enabled()
        loss = loss.detach()
        loss = loss / self._scaler._scale if scaled else loss.clone()
        self._backpropagated.append((loss.reshape(()), self._counts(trainer.optimizers)))

    def _counts(self, optimizers: Any) -> list[int]:
        """Return how often each optimizer's gradients were added to."""
        monitor = self._monitor
        return [] if monitor is None else [monitor.backwards_of(optimizer) for optimizer in optimizers]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Record the loss of a step that is about to be taken."""
        losses = self._losses_of(trainer.optimizers.index(optimizer), trainer.optimizers)
        if self._monitor is not None and losses:
            loss = torch.stack(losses).sum()
            self._monitor.loss(loss, step=self._monitor.step_of(optimizer), optimizer=optimizer)
        self._stepped = True

    def _losses_of(self, index: int, optimizers: Any) -> list[torch.Tensor]:
        """Return the losses that have added to gradients of one optimizer."""
        last = self._counts(optimizers)
        counts = [before for _, before in self._backpropagated] + [last]
        followed = any(last)  # a strategy may hide the parameters that autograd sees
        return [
            loss
            for (loss, before), after in zip(self._backpropagated, counts[1:], strict=True)
            if after[index] > before[index] or not followed
        ]

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the numbers of the last watched step."""
        pl_module.log_dict(self._latest(), batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop, and write the report."""
        self._stop(save=trainer.is_global_zero)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop, and write what was recorded until then."""
        self._stop(save=trainer.is_global_zero)
