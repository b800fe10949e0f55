# why correct: the callable wrapper accumulates scaled gradients and only unscales, clips, steps and updates when need_update is true
import math
import sys

import torch
import torch.distributed as dist
from torch import nn


def total_norm(params, p=2.0):
    grads = [q.grad for q in params if q.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, p) for g in grads]), p)


class LossScalerWithNorm:
    key = "amp_scaler"

    def __init__(self, enabled=True):
        self._inner = torch.cuda.amp.GradScaler(enabled=enabled)

    def __call__(self, loss, optimizer, params, clip=None, create_graph=False, need_update=True):
        self._inner.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return None
        self._inner.unscale_(optimizer)
        if clip is None:
            norm = total_norm(params)
        else:
            norm = nn.utils.clip_grad_norm_(params, clip)
        self._inner.step(optimizer)
        self._inner.update()
        return norm

    def state_dict(self):
        return self._inner.state_dict()

    def load_state_dict(self, sd):
        self._inner.load_state_dict(sd)


def finetune_epoch(model, criterion, loader, optimizer, device, epoch, loss_scaler, lr_fn, accum=8, clip=1.0):
    model.train()
    params = [p for p in model.parameters() if p.requires_grad]
    usable = len(loader) // accum * accum
    optimizer.zero_grad()
    norm = None
    for i, (img, tgt) in enumerate(loader):
        if i >= usable:
            break
        if i % accum == 0:
            for g in optimizer.param_groups:
                g["lr"] = lr_fn(i / len(loader) + epoch) * g.get("lr_scale", 1.0)
        img, tgt = img.to(device, non_blocking=True), tgt.to(device, non_blocking=True)
        with torch.cuda.amp.autocast():
            loss = criterion(model(img), tgt)
        value = loss.item()
        if not math.isfinite(value):
            print(f"loss is {value}")
            sys.exit(1)
        boundary = (i + 1) % accum == 0
        got = loss_scaler(loss / accum, optimizer, params, clip=clip, need_update=boundary)
        if boundary:
            norm = got
            optimizer.zero_grad()
    return norm


def save(path, model, optimizer, loss_scaler, epoch):
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                LossScalerWithNorm.key: loss_scaler.state_dict(), "epoch": epoch}, path)
