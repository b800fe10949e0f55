"""A Lightning callback that records the health of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from ampaudit.report.training import Health
from ampaudit.training.watch import TrainingMonitor, watch

__all__ = ["LightningHealthCallback"]


class LightningHealthCallback(Callback):
    """Records the health of a Lightning run, and writes the report at its end.

    Args:
        path: of the JSON report; ``None`` writes none.
        every: watch one step of so many.
        dtype: the 16-bit format that is asked about.
    """

    def __init__(self, path: Path | str | None = None, *, every: int = 10, dtype: str = "float16") -> None:
        self._path, self._every, self._dtype = path, every, dtype
        self._watch: TrainingMonitor | None = None

    @property
    def health(self) -> Health | None:
        """What was seen so far."""
        return None if self._watch is None else self._watch.health()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin, with the first optimizer and the precision plugin's scaler."""
        optimizer = trainer.optimizers[0]
        optimizer = getattr(optimizer, "optimizer", optimizer)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._watch = watch(pl_module, optimizer, scaler, every=self._every, dtype=self._dtype)
        self._watch.__enter__()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tell the loss of the step that has just ended."""
        del trainer, pl_module, batch, batch_idx
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._watch is not None and self._watch.step and isinstance(loss, torch.Tensor):
            self._watch.tell(self._watch.step - 1, loss)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop, and write the report."""
        del pl_module
        self._end(save=trainer.is_global_zero)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Take the hooks off; what was seen is kept."""
        del trainer, pl_module, exception
        self._end(save=False)

    def _end(self, *, save: bool) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            if save and self._path is not None:
                self._watch.save(self._path, force=True)
