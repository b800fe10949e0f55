# source: https://github.com/mosaicml/composer/pull/1376
# mistake: the checkpoint's scaler state is loaded first and then thrown away because fit() builds a fresh GradScaler, so resuming loses the loss scale
# severity: warning
from dataclasses import dataclass, field
from typing import Optional

import torch
from torch import nn


@dataclass
class EngineState:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.cuda.amp.GradScaler = field(default_factory=torch.cuda.amp.GradScaler)
    epoch: int = 0

    def state_dict(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "epoch": self.epoch,
        }

    def load_state_dict(self, sd):
        self.model.load_state_dict(sd["model"])
        self.optimizer.load_state_dict(sd["optimizer"])
        self.scaler.load_state_dict(sd["scaler"])
        self.epoch = sd["epoch"]


class Engine:
    def __init__(self, model, optimizer, loss_fn, resume: Optional[str] = None):
        self.state = EngineState(model.cuda(), optimizer)
        self.loss_fn = loss_fn
        if resume:
            self.state.load_state_dict(torch.load(resume, map_location="cuda"))

    def fit(self, loader, max_epochs, precision="amp"):
        self.amp = precision == "amp"
        self.state.scaler = torch.cuda.amp.GradScaler(enabled=self.amp)  # <- here
        while self.state.epoch < max_epochs:
            self._train_loop(loader)
            self.state.epoch += 1
            torch.save(self.state.state_dict(), f"ckpt-{self.state.epoch}.pt")

    def _train_loop(self, loader):
        self.state.model.train()
        for x, y in loader:
            self._train_batch(x.cuda(), y.cuda())

    def _train_batch(self, x, y):
        s = self.state
        s.optimizer.zero_grad()
        with torch.cuda.amp.autocast(enabled=self.amp):
            loss = self.loss_fn(s.model(x), y)
        s.scaler.scale(loss).backward()
        s.scaler.step(s.optimizer)
        s.scaler.update()


def build(resume):
    net = nn.Sequential(nn.Conv1d(12, 64, 15, padding=7), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 5))
    net = net.cuda()
    return Engine(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), nn.CrossEntropyLoss(), resume)
