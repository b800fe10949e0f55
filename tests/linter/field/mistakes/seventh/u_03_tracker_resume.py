# source: https://github.com/facebookresearch/co-tracker/pull/101
# mistake: the checkpoint holds model, optimizer and schedule but not the GradScaler, so a resumed fp16 run restarts at scale 65536 and its curve is disrupted
# severity: warning
import os

import torch
from torch import nn
from torch.amp import GradScaler, autocast


class PointTrackerRun:
    def __init__(self, model, loader, workdir, lr=5e-4, total_steps=100_000):
        self.device = torch.device("cuda")
        self.model = model.to(self.device)
        self.loader = loader
        self.workdir = workdir
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=1e-5)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, lr, total_steps=total_steps + 100, pct_start=0.05)
        self.scaler = GradScaler("cuda")  # <- here
        self.total_steps = total_steps
        self.step = 0

    @property
    def ckpt_path(self):
        return os.path.join(self.workdir, "last.pth")

    def dump(self):
        state = {  # <- here
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "step": self.step,
        }
        tmp = self.ckpt_path + ".tmp"
        torch.save(state, tmp)  # <- here
        os.replace(tmp, self.ckpt_path)

    def restore(self):
        if not os.path.exists(self.ckpt_path):
            return False
        state = torch.load(self.ckpt_path, map_location=self.device)  # <- here
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])  # <- here
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]
        return True

    def sequence_loss(self, video, queries, gt, valid, gamma=0.8):
        preds = self.model(video, queries)
        loss = 0.0
        for i, pred in enumerate(preds):
            weight = gamma ** (len(preds) - i - 1)
            err = (pred.float() - gt).abs().sum(-1)
            loss = loss + weight * (err * valid).sum() / valid.sum().clamp(min=1)
        return loss / len(preds)

    def train_step(self, batch):
        video, queries, gt, valid = (t.to(self.device, non_blocking=True) for t in batch)
        self.optimizer.zero_grad(set_to_none=True)
        with autocast("cuda", dtype=torch.float16):
            loss = self.sequence_loss(video, queries, gt, valid)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        return loss.item()

    def run(self):
        self.restore()
        self.model.train()
        while self.step < self.total_steps:
            for batch in self.loader:
                value = self.train_step(batch)
                self.step += 1
                if self.step % 100 == 0:
                    print(f"[{self.step}] {value:.4f}")
                if self.step % 1000 == 0:
                    self.dump()
                if self.step >= self.total_steps:
                    break
