# source: meta-pytorch/tnt#354
# mistake: the returned and logged loss is the one multiplied by the loss scale, so the reported training loss (and the plateau scheduler fed with it) is wrong
# severity: warning
from typing import Callable, Iterable

import torch
from torch import Tensor, nn


class AutoStep:
    """Minimal unit: forward, backward and step, returns the loss of the batch."""

    def __init__(self, module: nn.Module, loss_fn: Callable[[Tensor, Tensor], Tensor], lr: float,
                 half: bool = True, clip: float = 5.0):
        self.module = module.cuda()
        self.loss_fn = loss_fn
        self.half = half
        self.clip = clip
        self.opt = torch.optim.AdamW(self.module.parameters(), lr=lr)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, patience=2)
        self.scaler = torch.amp.GradScaler("cuda", enabled=half)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.half):
            loss = self.loss_fn(self.module(x), y)
        loss = self.scaler.scale(loss)  # <- here
        loss.backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)
        return loss.detach()  # <- here

    def epoch(self, loader: Iterable) -> float:
        self.module.train()
        total, count = 0.0, 0
        for x, y in loader:
            value = self(x.cuda(), y.cuda())
            total += value.item() * x.size(0)  # <- here
            count += x.size(0)
        mean = total / count
        self.plateau.step(mean)  # <- here
        return mean


def build(n_features: int, hidden: int = 256) -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm1d(n_features),
        nn.Linear(n_features, hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, 1), nn.Flatten(0))


def main(train_loader, n_features):
    unit = AutoStep(build(n_features), nn.SmoothL1Loss(), lr=1e-3)
    for e in range(40):
        print(f"epoch {e:02d} train loss {unit.epoch(train_loader):.5f} lr {unit.opt.param_groups[0]['lr']:.2e}")
