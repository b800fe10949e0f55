"""
# style of: coqui-ai/Trainer:trainer/trainer.py
# correct: a batch with a non-finite loss is left out before scale() and backward(), so no scaler state is pending; both optimizers share one scaler that updates after the last step.
# torch: 1.10+
"""
import math
import time
from typing import Any, Dict, List

import torch


class Trainer:
    def __init__(self, config, model, train_loader, device="cuda"):
        self.config = config
        self.model = model.to(device)
        self.loader = train_loader
        self.device = device
        self.use_amp_scaler = config.mixed_precision and config.precision == "fp16"
        self.optimizers: List[torch.optim.Optimizer] = model.get_optimizers(config.lr)
        self.scaler = torch.cuda.amp.GradScaler() if self.use_amp_scaler else None
        self.total_steps_done = 0
        self.skipped_batches = 0

    def _autocast(self):
        return torch.autocast(self.device, dtype=torch.float16, enabled=self.use_amp_scaler)

    def _step_one(self, batch, idx, optimizer):
        """Returns False when the batch has to be left out for this optimizer."""
        with self._autocast():
            outputs, loss_dict = self.model.train_step(batch, optimizer_idx=idx)
        loss = loss_dict["loss"]
        if not math.isfinite(loss.item()):
            self.skipped_batches += 1
            print(f" > NaN or inf loss in batch {self.total_steps_done}, optimizer {idx}: skipped")
            return False, loss_dict

        optimizer.zero_grad(set_to_none=True)
        if self.use_amp_scaler:
            self.scaler.scale(loss).backward()
            if self.config.grad_clip[idx] > 0:
                self.scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(self.model.parts[idx].parameters(), self.config.grad_clip[idx])
            self.scaler.step(optimizer)
        else:
            loss.backward()
            if self.config.grad_clip[idx] > 0:
                torch.nn.utils.clip_grad_norm_(self.model.parts[idx].parameters(), self.config.grad_clip[idx])
            optimizer.step()
        return True, loss_dict

    def train_step(self, batch) -> Dict[str, Any]:
        logs, stepped = {}, False
        for idx, optimizer in enumerate(self.optimizers):
            ok, loss_dict = self._step_one(batch, idx, optimizer)
            stepped = stepped or ok
            logs.update({f"{k}_{idx}": v.item() for k, v in loss_dict.items()})
        # update() wants at least one step since the last one
        if stepped and self.scaler is not None:
            self.scaler.update()
        self.total_steps_done += 1
        return logs

    def train_epoch(self):
        self.model.train()
        start = time.time()
        for batch in self.loader:
            batch = {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}
            logs = self.train_step(batch)
            if self.total_steps_done % self.config.print_step == 0:
                scale = self.scaler.get_scale() if self.scaler is not None else 1.0
                print(self.total_steps_done, logs, f"scale {scale:.0f}", f"{time.time() - start:.1f}s")

    def fit(self):
        for _ in range(self.config.epochs):
            self.train_epoch()
