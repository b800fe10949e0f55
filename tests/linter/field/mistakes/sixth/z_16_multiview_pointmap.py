# source: engichang1467/Open-Rig3R issue #35
# mistake: CUDA autocast (float16 by default) is used without any loss scaling, so small gradients underflow to zero
# severity: error
import os
import sys
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import autocast

sys.path.append(os.path.dirname(__file__))


class MultiTask(nn.Module):
    def __init__(self, w_points=1.0, w_rays=0.5):
        super().__init__()
        self.w_points, self.w_rays = w_points, w_rays

    def forward(self, out, batch):
        err = (out["points"].float() - batch["points"]).square().sum(-1)
        points = (err * batch["valid"]).sum() / batch["valid"].sum().clamp(min=1)
        rays = 1 - F.cosine_similarity(out["rays"].float(), batch["rays"], dim=-1).mean()
        return {"points": self.w_points * points, "rays": self.w_rays * rays}


def to_device(batch, device):
    return {k: v.to(device, non_blocking=True) for k, v in batch.items()}


def train_one(model, criterion, loader, optimizer, device):
    model.train()
    meters = defaultdict(float)
    for batch in loader:
        batch = to_device(batch, device)
        with autocast(device_type=device):  # <- here
            out = model(batch["images"], batch["meta"])
            terms = criterion(out, batch)
            total = sum(terms.values())
        optimizer.zero_grad()
        total.backward()  # <- here
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # <- here
        for k, v in terms.items():
            meters[k] += v.item() / len(loader)
    return dict(meters)


@torch.no_grad()
def validate(model, criterion, loader, device):
    model.eval()
    meters = defaultdict(float)
    for batch in loader:
        batch = to_device(batch, device)
        with autocast(device_type=device):
            terms = criterion(model(batch["images"], batch["meta"]), batch)
        for k, v in terms.items():
            meters[k] += v.item() / len(loader)
    return dict(meters)


def main():
    from rig_data import make_loaders
    from rig_model import RigNet

    device = "cuda"
    train_dl, val_dl = make_loaders("configs/rig.toml")
    model = RigNet().to(device)
    criterion = MultiTask()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05)
    sched = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-4, total_steps=50)
    for epoch in range(50):
        tr = train_one(model, criterion, train_dl, optimizer, device)
        va = validate(model, criterion, val_dl, device)
        sched.step()
        print(epoch, tr, va, flush=True)
        torch.save({"model": model.state_dict(), "opt": optimizer.state_dict(), "sched": sched.state_dict()}, "last.pt")


if __name__ == "__main__":
    main()
