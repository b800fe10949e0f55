# source: https://github.com/fastai/fastai/issues/3048
# mistake: the loss that is logged and given to ReduceLROnPlateau is the scaled one, which changes with the loss scale instead of with the model
# severity: warning
from dataclasses import dataclass

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.optim.lr_scheduler import ReduceLROnPlateau


@dataclass
class Settings:
    lr: float = 3e-3
    epochs: int = 60
    accumulate: int = 8
    patience: int = 3


class SoilNet(nn.Module):
    def __init__(self, bands=200, props=6):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, 32, 9, stride=2), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 9, stride=2), nn.ReLU()
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool1d(8), nn.Flatten(), nn.Linear(512, props))

    def forward(self, spectra):
        return self.head(self.conv(spectra.unsqueeze(1)))


class Learner:
    def __init__(self, model, settings):
        self.model = model.cuda()
        self.s = settings
        self.opt = torch.optim.AdamW(model.parameters(), lr=settings.lr)
        self.plateau = ReduceLROnPlateau(self.opt, patience=settings.patience, factor=0.5)
        self.scaler = GradScaler()
        self.loss_fn = nn.SmoothL1Loss()

    def _forward_backward(self, x, y, group):
        with autocast():
            loss = self.loss_fn(self.model(x), y) / group
        loss = self.scaler.scale(loss)  # <- here
        loss.backward()
        return loss.item() * group  # <- here

    def _step(self):
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)

    def _epoch(self, loader):
        self.model.train()
        n = len(loader)
        total = 0.0
        for i, (x, y) in enumerate(loader):
            first = i - i % self.s.accumulate
            group = min(self.s.accumulate, n - first)
            total += self._forward_backward(x.cuda(), y.cuda(), group)  # <- here
            if (i + 1) % self.s.accumulate == 0 or i + 1 == n:
                self._step()
        return total / n

    def fit(self, loader):
        for epoch in range(self.s.epochs):
            train_loss = self._epoch(loader)
            self.plateau.step(train_loss)  # <- here
            print(f"epoch {epoch} loss {train_loss:.4f} lr {self.opt.param_groups[0]['lr']:.2e}")
