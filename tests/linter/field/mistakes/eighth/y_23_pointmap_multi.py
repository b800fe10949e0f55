# source: https://github.com/engichang1467/Open-Rig3R/issues/35
# mistake: on CUDA autocast without dtype means float16, and there is no gradient scaling anywhere, so small gradients flush to zero.
# severity: warning
import random
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
import yaml
from torch.amp import autocast
from torch.utils.data import DataLoader

from rig.data import RigScenes
from rig.model import RigTransformer


class MultiTask(nn.Module):
    def __init__(self, w_point=1.0, w_ray=0.5, w_conf=0.01):
        super().__init__()
        self.w_point, self.w_ray, self.w_conf = w_point, w_ray, w_conf

    def forward(self, out, gt):
        valid = gt["valid"]
        point = (out["points"].float() - gt["points"]).norm(dim=-1)[valid].mean()
        ray = (1 - F.cosine_similarity(out["rays"].float(), gt["rays"], dim=-1))[valid].mean()
        conf = -out["log_conf"].float()[valid].mean()
        return self.w_point * point + self.w_ray * ray + self.w_conf * conf, {"point": point, "ray": ray}


def to(batch, device):
    return {k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v for k, v in batch.items()}


def train_epoch(model, loader, criterion, optimizer, device, clip):
    model.train()
    sums = {}
    for batch in loader:
        batch = to(batch, device)
        optimizer.zero_grad(set_to_none=True)
        with autocast(device_type=device.type):  # <- here
            out = model(batch["images"], batch["meta"])
            loss, parts = criterion(out, batch)
        loss.backward()  # <- here
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()  # <- here
        for k, v in parts.items():
            sums[k] = sums.get(k, 0.0) + v.item()
    return {k: v / len(loader) for k, v in sums.items()}


@torch.no_grad()
def valid_epoch(model, loader, criterion, device):
    model.eval()
    total = 0.0
    for batch in loader:
        batch = to(batch, device)
        with autocast(device_type=device.type):
            loss, _ = criterion(model(batch["images"], batch["meta"]), batch)
        total += loss.item()
    return total / max(len(loader), 1)


def main(path="configs/train.yaml"):
    cfg = yaml.safe_load(Path(path).read_text())
    random.seed(cfg["seed"])
    torch.manual_seed(cfg["seed"])
    device = torch.device("cuda", 0)
    train_dl = DataLoader(RigScenes(cfg["root"], "train"), cfg["batch"], shuffle=True, num_workers=8, drop_last=True)
    valid_dl = DataLoader(RigScenes(cfg["root"], "val"), cfg["batch"], num_workers=4)
    model = RigTransformer(**cfg["model"]).to(device)
    criterion = MultiTask(**cfg["loss"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg["epochs"])
    best = float("inf")
    for epoch in range(cfg["epochs"]):
        parts = train_epoch(model, train_dl, criterion, optimizer, device, cfg["clip"])
        val = valid_epoch(model, valid_dl, criterion, device)
        scheduler.step()
        print(epoch, {k: f"{v:.4f}" for k, v in parts.items()}, f"val {val:.4f}")
        if val < best:
            best = val
            torch.save({"model": model.state_dict(), "epoch": epoch, "val": val}, cfg["checkpoint"])


if __name__ == "__main__":
    main()
