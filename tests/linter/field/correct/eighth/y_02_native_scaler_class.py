# why correct: the callable wrapper scales, and unscales, clips, steps and updates only when the update is due; its state goes into the checkpoint.
import argparse
import math
import sys

import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models import create_model

from galaxy import GalaxySet


def total_norm(params):
    grads = [p.grad for p in params if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))


class ScaledBackward:
    key = "amp_scaler"

    def __init__(self, enabled=True):
        self._inner = torch.cuda.amp.GradScaler(enabled=enabled)

    def __call__(self, loss, optimizer, parameters, clip=None, create_graph=False, need_update=True):
        self._inner.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return None
        parameters = list(parameters)
        self._inner.unscale_(optimizer)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(parameters, clip)
        else:
            norm = total_norm(parameters)
        self._inner.step(optimizer)
        self._inner.update()
        return norm

    def state_dict(self):
        return self._inner.state_dict()

    def load_state_dict(self, state):
        self._inner.load_state_dict(state)


def one_epoch(model, criterion, loader, optimizer, backward, mixup, accum, clip):
    model.train()
    optimizer.zero_grad()
    usable = len(loader) - len(loader) % accum
    for i, (x, y) in enumerate(loader):
        if i == usable:
            break
        x, y = mixup(x.cuda(), y.cuda())
        with torch.cuda.amp.autocast():
            loss = criterion(model(x), y)
        value = loss.item()
        if not math.isfinite(value):
            print("loss is", value, "- giving up")
            sys.exit(1)
        due = (i + 1) % accum == 0
        norm = backward(loss / accum, optimizer, model.parameters(), clip=clip, need_update=due)
        if due:
            optimizer.zero_grad()
            if (i + 1) % (accum * 50) == 0:
                print(f"  {i + 1}/{usable} loss {value:.4f} norm {norm:.3f}")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("root")
    p.add_argument("--model", default="vit_small_patch16_224")
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--clip", type=float, default=None)
    p.add_argument("--resume")
    a = p.parse_args()
    model = create_model(a.model, num_classes=10, drop_path_rate=0.1).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, a.epochs)
    backward = ScaledBackward()
    loader = DataLoader(GalaxySet(a.root), 128, shuffle=True, drop_last=True, num_workers=8)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
    first = 0
    if a.resume:
        ck = torch.load(a.resume, map_location="cpu")
        model.load_state_dict(ck["model"])
        optimizer.load_state_dict(ck["optimizer"])
        plan.load_state_dict(ck["plan"])
        backward.load_state_dict(ck[ScaledBackward.key])
        first = ck["epoch"] + 1
    for epoch in range(first, a.epochs):
        one_epoch(model, SoftTargetCrossEntropy(), loader, optimizer, backward, mixup, a.accum, a.clip)
        plan.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "plan": plan.state_dict(),
                    ScaledBackward.key: backward.state_dict(), "epoch": epoch}, "galaxy.pth")


if __name__ == "__main__":
    main()
