"""
# source: https://github.com/ultralytics/ultralytics/pull/24731
# mistake: validation converts the live EMA model to float16 in place and back; every epoch the averaged weights lose precision and any value above 65504 stays inf.
# severity: error
# torch: any
"""
import copy

import torch
from torch import nn


class EMA:
    def __init__(self, model, decay=0.9999):
        self.ema = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        state = model.state_dict()
        for k, v in self.ema.state_dict().items():
            if v.dtype.is_floating_point:
                v.mul_(self.decay).add_(state[k].detach(), alpha=1 - self.decay)


class Validator:
    def __init__(self, loader, device):
        self.loader = loader
        self.device = device

    @torch.no_grad()
    def __call__(self, trainer):
        model = trainer.ema.ema
        half = self.device.type != "cpu" and trainer.amp
        model = model.half() if half else model.float()  # <- here
        model.eval()
        hits = total = 0
        for images, labels in self.loader:
            images = images.to(self.device)
            images = images.half() if half else images.float()
            hits += (model(images).argmax(1).cpu() == labels).sum().item()
            total += len(labels)
        model.float()
        return hits / max(total, 1)


class Trainer:
    def __init__(self, model, train_loader, val_loader, amp=True):
        self.device = torch.device("cuda")
        self.model = model.to(self.device)
        self.train_loader = train_loader
        self.amp = amp
        self.ema = EMA(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cuda", enabled=amp)
        self.validator = Validator(val_loader, self.device)
        self.criterion = nn.CrossEntropyLoss()

    def train(self, epochs):
        for epoch in range(epochs):
            self.model.train()
            for x, y in self.train_loader:
                with torch.autocast("cuda", dtype=torch.float16, enabled=self.amp):
                    loss = self.criterion(self.model(x.to(self.device)), y.to(self.device))
                self.optimizer.zero_grad()
                self.scaler.scale(loss).backward()
                before = self.scaler.get_scale()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                if self.scaler.get_scale() >= before:
                    self.ema.update(self.model)
            print(epoch, self.validator(self))
            torch.save({"ema": self.ema.ema.state_dict(), "scaler": self.scaler.state_dict()}, "last.pt")
