# why correct: inside accumulate() Accelerate divides the loss and skips steps itself; clipping goes through the accelerator, which unscales, and only when gradients are complete
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn


@dataclass
class Settings:
    channels: int = 12
    length: int = 256
    dim: int = 192
    layers: int = 6
    epochs: int = 40
    batch: int = 64
    accumulate: int = 4
    lr: float = 6e-4
    betas: tuple = field(default=(0.9, 0.98))
    max_norm: float = 1.0
    mask_rate: float = 0.3


class Imputer(nn.Module):
    def __init__(self, s: Settings):
        super().__init__()
        self.inp = nn.Linear(2 * s.channels, s.dim)
        self.pos = nn.Parameter(torch.randn(1, s.length, s.dim) * 0.02)
        layer = nn.TransformerEncoderLayer(s.dim, 6, 4 * s.dim, batch_first=True, norm_first=True)
        self.trunk = nn.TransformerEncoder(layer, s.layers)
        self.out = nn.Linear(s.dim, s.channels)

    def forward(self, values, known):
        x = self.inp(torch.cat([values * known, known], -1))
        return self.out(self.trunk(x + self.pos))


def masked_error(guess, truth, hidden):
    wrong = (guess.float() - truth).abs() * hidden
    return wrong.sum() / hidden.sum().clamp_min(1.0)


def main(series, s=Settings()):
    accelerator = Accelerator(
        mixed_precision="fp16", gradient_accumulation_steps=s.accumulate,
        project_config=ProjectConfiguration("imputer", automatic_checkpoint_naming=True),
    )
    model = Imputer(s)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.lr, betas=s.betas)
    loader = torch.utils.data.DataLoader(series, s.batch, shuffle=True, drop_last=True)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, s.lr, total_steps=s.epochs * math.ceil(len(loader) / s.accumulate))
    model, optimizer, loader, plan = accelerator.prepare(model, optimizer, loader, plan)

    for epoch in range(s.epochs):
        model.train()
        for truth in loader:
            with accelerator.accumulate(model):
                hidden = (torch.rand_like(truth) < s.mask_rate).float()
                guess = model(truth, 1 - hidden)
                loss = masked_error(guess, truth, hidden)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), s.max_norm)
                optimizer.step()
                plan.step()
                optimizer.zero_grad()
        accelerator.print(epoch, accelerator.gather(loss.detach()).mean().item())
        accelerator.save_state()
    accelerator.end_training()
