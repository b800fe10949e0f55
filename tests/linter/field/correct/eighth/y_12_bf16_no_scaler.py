# why correct: float32 weights with bfloat16 autocast need no gradient scaler; losses and metrics are taken in float32.
import logging
import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from flow.data import FlyingThings
from flow.raft import RecurrentFlow

logger = logging.getLogger("flow")
amp16 = partial(torch.autocast, device_type="cuda", dtype=torch.bfloat16)


def sequence_loss(preds, truth, valid, gamma=0.8, limit=400.0):
    mag = truth.norm(dim=1)
    mask = (valid > 0.5) & (mag < limit)
    weights = [gamma ** (len(preds) - 1 - i) for i in range(len(preds))]
    loss = sum(w * ((p.float() - truth).abs().sum(1) * mask).mean() for w, p in zip(weights, preds))
    epe = (preds[-1].float() - truth).norm(dim=1)[mask]
    return loss, {"epe": epe.mean().item(), "1px": (epe < 1).float().mean().item()}


def no_decay_groups(model, wd):
    flat = [p for p in model.parameters() if p.ndim < 2]
    rest = [p for p in model.parameters() if p.ndim >= 2]
    return [{"params": rest, "weight_decay": wd}, {"params": flat, "weight_decay": 0.0}]


def lr_at(step, peak, total, warm=1000):
    if step < warm:
        return peak * step / warm
    return 0.5 * peak * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


@torch.no_grad()
def validate(model, loader):
    model.eval()
    errors = []
    for a, b, truth, valid in loader:
        with amp16():
            pred = model(a.cuda(), b.cuda(), iters=24)[-1]
        err = (pred.float().cpu() - truth).norm(dim=1)
        errors.append(err[valid > 0.5])
    model.train()
    return torch.cat(errors).mean().item()


def train(root, total=120000, batch=8, peak=2.5e-4, clip=1.0, save="flow.pt"):
    model = RecurrentFlow().cuda().train()
    optimizer = torch.optim.AdamW(no_decay_groups(model, 1e-4), lr=peak, eps=1e-8)
    loader = DataLoader(FlyingThings(root, "train"), batch, shuffle=True, num_workers=8, drop_last=True)
    held_out = DataLoader(FlyingThings(root, "test"), 4, num_workers=4)
    step, best = 0, float("inf")
    while step < total:
        for a, b, truth, valid in loader:
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step, peak, total)
            a, b, truth, valid = a.cuda(), b.cuda(), truth.cuda(), valid.cuda()
            with amp16():
                preds = model(a, b, iters=12)
            loss, metrics = sequence_loss(preds, truth, valid)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 100 == 0:
                logger.info("%d loss %.3f epe %.3f 1px %.3f", step, loss.item(), metrics["epe"], metrics["1px"])
            if step % 5000 == 0:
                epe = validate(model, held_out)
                if epe < best:
                    best = epe
                    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, save)
            if step >= total:
                break


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    train("/data/things")
