# why correct: the wrapper unscales, clips, steps and updates only when asked to, so micro-batches just add scaled gradients
import math
import sys

import torch
import torch.nn as nn


def total_norm(parameters):
    grads = [p.grad.detach() for p in parameters if p.grad is not None]
    return torch.norm(torch.stack([torch.norm(g) for g in grads]))


class ScalerWithNorm:
    state_dict_key = "amp_scaler"

    def __init__(self, enabled=True):
        self._scaler = torch.amp.GradScaler("cuda", enabled=enabled)

    def __call__(self, loss, optimizer, parameters, clip=None, create_graph=False, update_grad=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if not update_grad:
            return None
        parameters = list(parameters)
        self._scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, clip) if clip is not None else total_norm(parameters)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, d):
        self._scaler.load_state_dict(d)


def adjust_lr(optimizer, epoch, args):
    if epoch < args.warmup:
        lr = args.lr * epoch / args.warmup
    else:
        lr = 0.5 * args.lr * (1 + math.cos(math.pi * (epoch - args.warmup) / (args.epochs - args.warmup)))
    for g in optimizer.param_groups:
        g["lr"] = lr * g.get("lr_scale", 1.0)


def mae_epoch(model, loader, optimizer, epoch, loss_scaler, args):
    model.train()
    optimizer.zero_grad()
    n = len(loader) // args.accum_iter * args.accum_iter
    for i, images in enumerate(loader):
        if i >= n:
            break
        if i % args.accum_iter == 0:
            adjust_lr(optimizer, epoch + i / n, args)
        images = images.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss, _, _ = model(images, mask_ratio=args.mask_ratio)
        value = loss.item()
        if not math.isfinite(value):
            print("loss is", value)
            sys.exit(1)
        last = (i + 1) % args.accum_iter == 0
        norm = loss_scaler(loss / args.accum_iter, optimizer, model.parameters(), clip=args.clip, update_grad=last)
        if last:
            optimizer.zero_grad()
            print(epoch, i, value, float(norm))


def pretrain(model, loader, args):
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    loss_scaler = ScalerWithNorm()
    start = 0
    if args.resume:
        ck = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(ck["model"])
        optimizer.load_state_dict(ck["optimizer"])
        loss_scaler.load_state_dict(ck[ScalerWithNorm.state_dict_key])
        start = ck["epoch"] + 1
    for epoch in range(start, args.epochs):
        mae_epoch(model, loader, optimizer, epoch, loss_scaler, args)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch,
                    ScalerWithNorm.state_dict_key: loss_scaler.state_dict()}, args.out)
