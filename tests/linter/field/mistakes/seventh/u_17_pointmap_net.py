# source: https://github.com/engichang1467/Open-Rig3R/issues/35
# mistake: CUDA autocast defaults to float16 but no GradScaler is used, so small gradients underflow to zero
# severity: warning
import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import autocast


class MultiTaskLoss(nn.Module):
    def __init__(self, w_points=1.0, w_ray=0.1):
        super().__init__()
        self.w_points, self.w_ray = w_points, w_ray

    def forward(self, out, target):
        points = F.mse_loss(out["points"].float(), target["points"])
        ray = 1 - F.cosine_similarity(out["rays"].float(), target["rays"], dim=-1).mean()
        return self.w_points * points + self.w_ray * ray


def train_one_epoch(model, loader, criterion, optimizer, device, max_norm):
    model.train()
    total = 0.0
    for images, meta, target in loader:
        images = images.to(device, non_blocking=True)
        meta = {k: v.to(device) for k, v in meta.items()}
        target = {k: v.to(device) for k, v in target.items()}

        optimizer.zero_grad(set_to_none=True)
        with autocast(device_type="cuda"):  # <- here
            outputs = model(images, meta)
            loss = criterion(outputs, target)
        loss.backward()  # <- here
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()  # <- here
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def validate(model, loader, criterion, device):
    model.eval()
    total = 0.0
    for images, meta, target in loader:
        with autocast(device_type="cuda"):
            outputs = model(images.to(device), {k: v.to(device) for k, v in meta.items()})
        total += criterion(outputs, {k: v.to(device) for k, v in target.items()}).item()
    return total / len(loader)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=40)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--max-norm", type=float, default=1.0)
    args = p.parse_args()

    from rig.data import make_loaders
    from rig.model import RigNet

    device = torch.device("cuda")
    model = RigNet().to(device)
    criterion = MultiTaskLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    train_loader, val_loader = make_loaders()
    best = float("inf")
    for epoch in range(args.epochs):
        tr = train_one_epoch(model, train_loader, criterion, optimizer, device, args.max_norm)
        va = validate(model, val_loader, criterion, device)
        sched.step()
        print(f"{epoch}: train {tr:.4f} val {va:.4f}")
        if va < best:
            best = va
            torch.save(model.state_dict(), "best.pt")


if __name__ == "__main__":
    main()
