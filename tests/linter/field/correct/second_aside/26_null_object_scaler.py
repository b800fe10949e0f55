"""
# style of: ludwig-ai/ludwig:ludwig/trainers/trainer.py (with a null object for the scaler)
# correct: without AMP a stand-in with the scaler's interface passes losses and steps through; the loop has one path and it is the documented order.
# torch: 1.12+
"""
import contextlib
import logging
from typing import Dict, Optional, Protocol

import torch
from torch import nn

logger = logging.getLogger(__name__)


class Scaler(Protocol):
    def scale(self, loss): ...
    def unscale_(self, optimizer): ...
    def step(self, optimizer): ...
    def update(self): ...


class NullScaler:
    """What GradScaler(enabled=False) does, for devices which do not know GradScaler."""

    def scale(self, loss):
        return loss

    def unscale_(self, optimizer):
        pass

    def step(self, optimizer):
        optimizer.step()

    def update(self):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Trainer:
    def __init__(self, model, optimizer, device, use_mixed_precision=False, clip: Optional[float] = 0.5):
        self.model = model.to(device)
        self.optimizer = optimizer
        self.device = torch.device(device)
        self.clip = clip
        amp = use_mixed_precision and self.device.type == "cuda"
        self.scaler: Scaler = torch.cuda.amp.GradScaler() if amp else NullScaler()
        self.precision = (lambda: torch.autocast("cuda", dtype=torch.float16)) if amp else contextlib.nullcontext
        self.steps = 0

    def forward_loss(self, batch: Dict[str, torch.Tensor]):
        with self.precision():
            outputs = self.model(batch["x"])
            return nn.functional.huber_loss(outputs.float().squeeze(-1), batch["y"])

    def train_step(self, batch, should_step=True, accumulation=1):
        loss = self.forward_loss(batch)
        self.scaler.scale(loss / accumulation).backward()
        if not should_step:
            return loss.detach()
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return loss.detach()

    def train(self, batches, epochs, accumulation=4, path="progress.pt"):
        for epoch in range(epochs):
            self.model.train()
            total = 0.0
            for i, batch in enumerate(batches):
                batch = {k: v.to(self.device) for k, v in batch.items()}
                group_end = (i + 1) % accumulation == 0 or i + 1 == len(batches)
                total += self.train_step(batch, group_end, accumulation).item()
            logger.info("epoch %d: %.4f after %d steps", epoch, total / len(batches), self.steps)
            torch.save(
                {
                    "model": self.model.state_dict(),
                    "optimizer": self.optimizer.state_dict(),
                    "scaler": self.scaler.state_dict(),
                    "steps": self.steps,
                },
                path,
            )

    def resume(self, path):
        state = torch.load(path, map_location=self.device)
        for name in ("model", "optimizer", "scaler"):
            getattr(self, name).load_state_dict(state[name])
        self.steps = state["steps"]
