# why correct: the scaler isn't named where the checkpoint is written, but it is one of the registered parts, all of which are saved and restored
import os
import tempfile
from typing import Any, Dict

import torch
from torch import nn


class Experiment:
    """Everything assigned to an attribute that has state_dict/load_state_dict goes into the checkpoint."""

    def __init__(self):
        object.__setattr__(self, "_parts", {})
        self.counters = {"epoch": 0, "step": 0}

    def __setattr__(self, name: str, value: Any):
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            self._parts[name] = value
        object.__setattr__(self, name, value)

    def dump(self, path: str):
        blob: Dict[str, Any] = {k: v.state_dict() for k, v in self._parts.items()}
        blob["counters"] = dict(self.counters)
        fd, tmp = tempfile.mkstemp(dir=os.path.dirname(path) or ".")
        os.close(fd)
        torch.save(blob, tmp)
        os.replace(tmp, path)

    def maybe_load(self, path: str):
        if not os.path.exists(path):
            return False
        blob = torch.load(path, map_location="cpu")
        for k, part in self._parts.items():
            part.load_state_dict(blob[k])
        self.counters.update(blob["counters"])
        return True


class OpticalFlow(Experiment):
    def __init__(self, net: nn.Module, lr: float, total: int):
        super().__init__()
        self.net = net.cuda()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr, weight_decay=1e-4, eps=1e-8)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, lr, total + 100, pct_start=0.05,
                                                            anneal_strategy="linear")
        self.scaler = torch.amp.GradScaler("cuda")
        self.total = total

    def sequence_loss(self, flows, gt, valid, gamma=0.8):
        n = len(flows)
        return sum(gamma ** (n - 1 - i) * (valid[:, None] * (f.float() - gt).abs()).mean() for i, f in enumerate(flows))

    def one(self, im1, im2, gt, valid):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            flows = self.net(im1, im2)
        loss = self.sequence_loss(flows, gt, valid)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.schedule.step()
        self.scaler.update()
        self.counters["step"] += 1
        return loss.item()

    def run(self, loader, path="flow.ckpt"):
        if self.maybe_load(path):
            print("resumed at", self.counters)
        while self.counters["step"] < self.total:
            for batch in loader:
                loss = self.one(*(t.cuda(non_blocking=True) for t in batch))
                if self.counters["step"] >= self.total:
                    break
            self.counters["epoch"] += 1
            self.dump(path)
            print(self.counters, loss)
