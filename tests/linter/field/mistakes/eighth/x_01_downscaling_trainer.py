# source: NCAR/miles-credit PR #141
# mistake: the gradients are clipped while still multiplied by the loss scale, so the norm limit bites on almost every step
# severity: error
"""Statistical downscaling of 2 m temperature: coarse analysis -> 1 km grid."""
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader

log = logging.getLogger("downscale")


@dataclass
class Settings:
    epochs: int = 40
    lr: float = 4e-4
    weight_decay: float = 1e-5
    max_norm: float = 1.0
    out: Path = Path("runs/t2m")


class Upsampler(nn.Module):
    def __init__(self, variables=11, width=96, factor=4):
        super().__init__()
        self.stem = nn.Conv2d(variables, width, 3, padding=1)
        self.body = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()) for _ in range(6)]
        )
        self.head = nn.Sequential(nn.Conv2d(width, factor * factor, 1), nn.PixelShuffle(factor))

    def forward(self, x):
        h = self.stem(x)
        return self.head(h + self.body(h))


class DownscalingTrainer:
    def __init__(self, net, cfg: Settings, device="cuda"):
        self.net = net.to(device)
        self.cfg = cfg
        self.device = device
        self.opt = torch.optim.AdamW(net.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, cfg.epochs)
        self.scaler = GradScaler("cuda")
        self.criterion = nn.SmoothL1Loss()

    def _limit_gradients(self):
        return nn.utils.clip_grad_norm_(self.net.parameters(), self.cfg.max_norm)  # <- here

    def _train_batch(self, coarse, fine):
        self.opt.zero_grad(set_to_none=True)
        with autocast("cuda", dtype=torch.float16):
            loss = self.criterion(self.net(coarse), fine)
        self.scaler.scale(loss).backward()  # <- here
        self._limit_gradients()  # <- here
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, loader):
        self.net.eval()
        err, n = 0.0, 0
        for coarse, fine in loader:
            coarse, fine = coarse.to(self.device), fine.to(self.device)
            with autocast("cuda", dtype=torch.float16):
                pred = self.net(coarse)
            err += (pred.float() - fine).abs().sum().item()
            n += fine.numel()
        return err / n

    def fit(self, train: DataLoader, valid: DataLoader):
        for epoch in range(self.cfg.epochs):
            self.net.train()
            total = 0.0
            for coarse, fine in train:
                total += self._train_batch(coarse.to(self.device), fine.to(self.device)).item()
            self.sched.step()
            log.info("epoch %d train %.4f mae %.4f", epoch, total / len(train), self.evaluate(valid))
            self.save(epoch)

    def save(self, epoch):
        self.cfg.out.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "epoch": epoch,
                "net": self.net.state_dict(),
                "opt": self.opt.state_dict(),
                "sched": self.sched.state_dict(),
                "scaler": self.scaler.state_dict(),
            },
            self.cfg.out / "last.pt",
        )
