# why correct: the wrapper unscales before clipping and only on accumulation boundaries, and exposes the inner scaler's state for checkpoints
import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F


class LossScaler:
    """backward + (maybe) clip + (maybe) step, in a single call."""

    state_key = "loss_scaler"

    def __init__(self, enabled=True):
        self._inner = torch.amp.GradScaler("cuda", enabled=enabled)

    def __call__(self, loss, optimizer, parameters, clip=None, mode="norm", boundary=True, second_order=False):
        self._inner.scale(loss).backward(create_graph=second_order)
        if not boundary:
            return None
        norm = None
        if clip:
            self._inner.unscale_(optimizer)
            if mode == "norm":
                norm = nn.utils.clip_grad_norm_(parameters, clip)
            elif mode == "value":
                nn.utils.clip_grad_value_(parameters, clip)
            else:
                raise ValueError(mode)
        self._inner.step(optimizer)
        self._inner.update()
        return norm

    def state_dict(self):
        return self._inner.state_dict()

    def load_state_dict(self, sd):
        self._inner.load_state_dict(sd)


class Plain:
    """Same call, for runs without mixed precision."""

    state_key = "loss_scaler"

    def __call__(self, loss, optimizer, parameters, clip=None, mode="norm", boundary=True, second_order=False):
        loss.backward(create_graph=second_order)
        if not boundary:
            return None
        norm = nn.utils.clip_grad_norm_(parameters, clip) if clip and mode == "norm" else None
        if clip and mode == "value":
            nn.utils.clip_grad_value_(parameters, clip)
        optimizer.step()
        return norm

    def state_dict(self):
        return {}

    def load_state_dict(self, sd):
        pass


def epoch(net, loader, opt, apply, args, ctx):
    net.train()
    opt.zero_grad()
    n = len(loader) - len(loader) % args.accum
    for i, (x, y) in enumerate(loader):
        if i == n:
            break
        last = (i + 1) % args.accum == 0
        with ctx():
            loss = F.cross_entropy(net(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
        apply(loss / args.accum, opt, net.parameters(), clip=args.clip, mode=args.clip_mode, boundary=last)
        if last:
            opt.zero_grad()


def main(build_model, loader):
    p = argparse.ArgumentParser()
    p.add_argument("--amp", action="store_true")
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--clip-mode", default="norm", choices=["norm", "value"])
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--resume", default="")
    args = p.parse_args()

    net = build_model().cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-5)
    apply = LossScaler() if args.amp else Plain()
    ctx = (lambda: torch.autocast("cuda", dtype=torch.float16)) if args.amp else torch.enable_grad
    first = 0
    if args.resume and os.path.isfile(args.resume):
        ck = torch.load(args.resume, map_location="cpu")
        net.load_state_dict(ck["net"])
        opt.load_state_dict(ck["opt"])
        if ck.get(apply.state_key):
            apply.load_state_dict(ck[apply.state_key])
        first = ck["epoch"] + 1
    for e in range(first, args.epochs):
        epoch(net, loader, opt, apply, args, ctx)
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "epoch": e,
                    apply.state_key: apply.state_dict()}, f"last_{e}.pt")
