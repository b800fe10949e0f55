# why correct: Accelerate's own backward and clip_grad_norm_ handle the fp16 scale, and clipping happens only when gradients are synchronised
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed


@dataclass
class CaptionConfig:
    lr: float = 5e-5
    epochs: int = 5
    accumulation: int = 4
    max_norm: float = 1.0
    pad_id: int = 0
    out: str = "caption_out"


class CaptionTrainer:
    def __init__(self, model, loader, cfg: CaptionConfig):
        set_seed(0)
        self.cfg = cfg
        self.accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=cfg.accumulation)
        optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=500)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.updates = 0

    def loss(self, batch):
        logits = self.model(batch["pixels"], batch["tokens"][:, :-1])
        return F.cross_entropy(
            logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), ignore_index=self.cfg.pad_id
        )

    def micro_step(self, batch):
        with self.accelerator.accumulate(self.model):
            loss = self.loss(batch)
            self.accelerator.backward(loss)
            self.maybe_clip()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        return loss.detach()

    def maybe_clip(self):
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.cfg.max_norm)
            self.updates += 1

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.model.train()
            total = torch.zeros((), device=self.accelerator.device)
            for batch in self.loader:
                total += self.micro_step(batch)
            mean = self.accelerator.gather(total / len(self.loader)).mean()
            self.accelerator.print(f"epoch {epoch}: {mean.item():.4f} after {self.updates} updates")
            self.accelerator.save_state(f"{self.cfg.out}/{epoch}")
