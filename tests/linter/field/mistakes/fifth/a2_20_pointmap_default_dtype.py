# source: https://github.com/engichang1467/Open-Rig3R/issues/35
# mistake: autocast without a dtype means float16 on CUDA, and the backward pass runs without any loss scaling, so small gradients flush to zero
# severity: warning
import argparse
import json
import pathlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import autocast
from torchvision.models import convnext_tiny


class PointHead(nn.Module):
    def __init__(self, cin=768, up=32):
        super().__init__()
        self.up = up
        self.pts = nn.Conv2d(cin, 3 * up * up, 1)
        self.ray = nn.Conv2d(cin, 3 * up * up, 1)

    def forward(self, f):
        pts = F.pixel_shuffle(self.pts(f), self.up)
        ray = F.pixel_shuffle(self.ray(f), self.up)
        return pts, ray


class RigNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = convnext_tiny(weights=None).features
        self.head = PointHead()

    def forward(self, img):
        return self.head(self.trunk(img))


class Objective(nn.Module):
    def __init__(self, w_ray=0.1):
        super().__init__()
        self.w_ray = w_ray

    def forward(self, pts, ray, gt_pts, gt_ray, valid):
        pts, ray = pts.float(), ray.float()
        err = (pts - gt_pts).square().sum(1)
        depth = (err * valid).sum() / valid.sum().clamp(min=1)
        cos = 1 - F.cosine_similarity(ray, gt_ray, dim=1)
        angle = (cos * valid).sum() / valid.sum().clamp(min=1)
        return depth + self.w_ray * angle


def run_epoch(model, loader, objective, device, optimizer=None):
    training = optimizer is not None
    model.train(training)
    total, count = 0.0, 0
    with torch.set_grad_enabled(training):
        for b in loader:
            b = {k: v.to(device, non_blocking=True) for k, v in b.items()}
            with autocast(device_type=device.type):  # <- here
                pts, ray = model(b["image"])
            loss = objective(pts, ray, b["points"], b["rays"], b["valid"].float())
            if training:
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # <- here
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()  # <- here
            total += loss.item() * len(b["image"])
            count += len(b["image"])
    return total / max(count, 1)


def main(make_loader):
    ap = argparse.ArgumentParser()
    ap.add_argument("--config", type=pathlib.Path, required=True)
    ap.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out"))
    a = ap.parse_args()
    cfg = json.loads(a.config.read_text())
    device = torch.device("cuda")
    model = RigNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], weight_decay=cfg["weight_decay"])
    objective = Objective(cfg.get("w_ray", 0.1))
    best = float("inf")
    for epoch in range(cfg["epochs"]):
        tr = run_epoch(model, make_loader("train"), objective, device, optimizer)
        va = run_epoch(model, make_loader("val"), objective, device)
        print(f"{epoch}\t{tr:.4f}\t{va:.4f}")
        if va < best:
            best = va
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, a.out / "best.pt")
