# why correct: the wrapper does scale, backward, unscale, clip, step and update itself, so the loop never touches the optimizer's step
import math
import sys

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_


class LossScaler:
    state_dict_key = "amp_scaler"

    def __init__(self, enabled=True):
        self._scaler = torch.amp.GradScaler("cuda", enabled=enabled)

    def __call__(self, loss, optimizer, parameters, clip_grad=None, create_graph=False, update_grad=True):
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if not update_grad:
            return None
        self._scaler.unscale_(optimizer)
        norm = clip_grad_norm_(parameters, clip_grad if clip_grad is not None else math.inf)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm

    def state_dict(self):
        return self._scaler.state_dict()

    def load_state_dict(self, sd):
        self._scaler.load_state_dict(sd)


def train_one_epoch(model, criterion, loader, optimizer, device, loss_scaler, args):
    model.train()
    optimizer.zero_grad()
    n = len(loader) - len(loader) % args.accum_iter
    for i, (samples, targets) in enumerate(loader):
        if i == n:
            break
        samples, targets = samples.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
            loss = criterion(model(samples), targets)
        value = loss.item()
        if not math.isfinite(value):
            print(f"Loss is {value}, stopping training")
            sys.exit(1)
        update = (i + 1) % args.accum_iter == 0
        norm = loss_scaler(
            loss / args.accum_iter, optimizer, list(model.parameters()), clip_grad=args.clip_grad, update_grad=update
        )
        if update:
            optimizer.zero_grad()
            if i % 100 == args.accum_iter - 1:
                print(f"{i}/{n} loss {value:.4f} norm {float(norm):.3f}")


def main(args, model, loader):
    device = torch.device("cuda")
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loss_scaler = LossScaler(args.amp)
    start = 0
    if args.resume:
        ck = torch.load(args.resume, map_location=device)
        model.load_state_dict(ck["model"])
        optimizer.load_state_dict(ck["optimizer"])
        loss_scaler.load_state_dict(ck[LossScaler.state_dict_key])
        start = ck["epoch"] + 1
    for epoch in range(start, args.epochs):
        train_one_epoch(model, nn.CrossEntropyLoss(), loader, optimizer, device, loss_scaler, args)
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                LossScaler.state_dict_key: loss_scaler.state_dict(),
                "epoch": epoch,
            },
            f"{args.out}/checkpoint.pth",
        )
