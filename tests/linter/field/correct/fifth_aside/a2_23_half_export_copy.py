# why correct: .half() is only called on a deep copy made for release and for a fast evaluation; training weights, EMA and resume state stay float32
import copy
import time
from pathlib import Path

import torch
import torch.nn as nn


class ModelEma:
    def __init__(self, model, decay=0.9998, tau=2000):
        self.ema = copy.deepcopy(model).eval().requires_grad_(False)
        self.n = 0
        self.rate = lambda k: decay * (1 - 2.718281828 ** (-k / tau))

    @torch.no_grad()
    def update(self, model):
        self.n += 1
        d = self.rate(self.n)
        live = model.state_dict()
        for k, v in self.ema.state_dict().items():
            if v.is_floating_point():
                v.mul_(d).add_(live[k].detach(), alpha=1 - d)
            else:
                v.copy_(live[k])


@torch.no_grad()
def evaluate(model, loader, metric, device):
    fast = copy.deepcopy(model).half().to(device).eval()
    tick = time.time()
    for img, boxes in loader:
        pred = fast(img.to(device, non_blocking=True).half() / 255)
        metric.add([p.float().cpu() for p in pred], boxes)
    return metric.compute(), time.time() - tick


def release(path, model, names, epoch):
    slim = copy.deepcopy(model).half().cpu()
    torch.save({"weights": slim.state_dict(), "names": names, "epoch": epoch}, path)


class DetectorRun:
    def __init__(self, model, loss_fn, out, names, lr=0.01, device="cuda"):
        self.device, self.names, self.out = torch.device(device), names, Path(out)
        self.model, self.loss_fn = model.to(self.device), loss_fn
        decay = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim <= 1]
        self.opt = torch.optim.SGD([{"params": decay, "weight_decay": 5e-4}, {"params": rest, "weight_decay": 0}],
                                   lr=lr, momentum=0.937, nesterov=True)
        self.scaler = torch.cuda.amp.GradScaler()
        self.ema = ModelEma(model)
        self.epoch = 0

    def state(self):
        return {"model": self.model.state_dict(), "ema": self.ema.ema.state_dict(), "updates": self.ema.n,
                "opt": self.opt.state_dict(), "scaler": self.scaler.state_dict(), "epoch": self.epoch}

    def load(self, s):
        self.model.load_state_dict(s["model"])
        self.ema.ema.load_state_dict(s["ema"])
        self.ema.n, self.epoch = s["updates"], s["epoch"]
        self.opt.load_state_dict(s["opt"])
        self.scaler.load_state_dict(s["scaler"])

    def train_epoch(self, loader):
        self.model.train()
        for img, boxes in loader:
            img = img.to(self.device, non_blocking=True).float() / 255
            with torch.cuda.amp.autocast():
                pred = self.model(img)
            loss = self.loss_fn([p.float() for p in pred], boxes)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.opt)
            nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
            self.scaler.step(self.opt)
            self.scaler.update()
            self.opt.zero_grad(set_to_none=True)
            self.ema.update(self.model)
        self.epoch += 1

    def fit(self, train, val, metric, epochs):
        best = -1.0
        while self.epoch < epochs:
            self.train_epoch(train)
            score, secs = evaluate(self.ema.ema, val, metric, self.device)
            torch.save(self.state(), self.out / "resume.pt")
            if score > best:
                best = score
                release(self.out / "best_fp16.pt", self.ema.ema, self.names, self.epoch)
            print(self.epoch, f"{score:.4f} in {secs:.1f}s")
