# source: ultralytics/ultralytics#22189
# mistake: the checkpoint holds model, optimizer and scheduler but not the GradScaler, so a resumed run restarts from the initial loss scale
# severity: warning
import os
from pathlib import Path

import torch
from torch import nn


class DetTrainer:
    """Anchor-free detector trainer with resumable checkpoints."""

    def __init__(self, net: nn.Module, criterion, run_dir: str, epochs: int = 300, lr: float = 1e-2):
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        self.net = net.to(self.device)
        self.criterion = criterion
        self.epochs = epochs
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=lr, momentum=0.937, nesterov=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda e: 1 - 0.99 * e / epochs)
        self.scaler = torch.amp.GradScaler("cuda")
        self.epoch = 0
        self.best = 0.0

    @property
    def last(self):
        return self.run_dir / "last.pt"

    def save(self, fitness):
        state = {  # <- here
            "epoch": self.epoch,
            "best": self.best,
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
        torch.save(state, self.last)  # <- here
        if fitness >= self.best:
            self.best = fitness
            torch.save({"model": state["model"]}, self.run_dir / "best.pt")

    def resume(self):
        if not self.last.exists():
            return
        ck = torch.load(self.last, map_location=self.device)  # <- here
        self.net.load_state_dict(ck["model"])
        self.optimizer.load_state_dict(ck["optimizer"])
        self.scheduler.load_state_dict(ck["scheduler"])
        self.epoch = ck["epoch"] + 1
        self.best = ck["best"]

    def train_one(self, loader):
        self.net.train()
        for images, targets in loader:
            images = images.to(self.device).float() / 255
            targets = targets.to(self.device)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.criterion(self.net(images), targets)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), 10.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def fit(self, train_loader, evaluate):
        self.resume()
        for self.epoch in range(self.epoch, self.epochs):
            self.train_one(train_loader)
            self.scheduler.step()
            self.save(evaluate(self.net))
