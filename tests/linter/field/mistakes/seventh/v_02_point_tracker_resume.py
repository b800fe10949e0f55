# source: facebookresearch/co-tracker PR #101 https://github.com/facebookresearch/co-tracker/pull/101
# mistake: the training snapshot holds model, optimizer and schedule but not the loss scaler, so a resumed run restarts at scale 65536
# severity: warning
import os

import torch
from torch import nn

SNAPSHOT = "runs/tracker/last.pt"
CFG = dict(lr=5e-4, steps=100_000, save_every=500, clip=1.0)


class PointTracker(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(2, dim, 5, padding=2), nn.GELU(), nn.Conv1d(dim, dim, 5, padding=2))
        self.refine = nn.GRU(dim, dim, batch_first=True)
        self.delta = nn.Linear(dim, 2)

    def forward(self, tracks):
        h = self.encoder(tracks.transpose(1, 2)).transpose(1, 2)
        h, _ = self.refine(h)
        return tracks + self.delta(h)


class Runner:
    def __init__(self, model, stream):
        self.model = model.cuda()
        self.stream = stream
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=CFG["lr"])
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.optim, CFG["lr"], total_steps=CFG["steps"] + 10)
        self.scaler = torch.amp.GradScaler("cuda")  # <- here
        self.step = 0
        if os.path.exists(SNAPSHOT):
            self.restore()

    def snapshot(self):
        os.makedirs(os.path.dirname(SNAPSHOT), exist_ok=True)
        payload = {  # <- here
            "model": self.model.state_dict(),
            "optim": self.optim.state_dict(),
            "sched": self.sched.state_dict(),
            "step": self.step,
        }
        torch.save(payload, SNAPSHOT)  # <- here

    def restore(self):
        payload = torch.load(SNAPSHOT, map_location="cuda")  # <- here
        self.model.load_state_dict(payload["model"])
        self.optim.load_state_dict(payload["optim"])
        self.sched.load_state_dict(payload["sched"])
        self.step = payload["step"]

    def run(self):
        for noisy, clean in self.stream:
            if self.step >= CFG["steps"]:
                break
            self.optim.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = (self.model(noisy.cuda()) - clean.cuda()).abs().mean()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optim)
            nn.utils.clip_grad_norm_(self.model.parameters(), CFG["clip"])
            self.scaler.step(self.optim)
            self.scaler.update()
            self.sched.step()
            self.step += 1
            if self.step % CFG["save_every"] == 0:
                self.snapshot()


if __name__ == "__main__":
    from tracker_data import endless_clips

    Runner(PointTracker(), endless_clips()).run()
