# why correct: the optimizer takes a closure and evaluates it twice, which GradScaler.step can't do, but bfloat16 autocast over float32 weights needs no scaler; each evaluation has its own autocast region, so the shifted weights are really used
import argparse

import torch
import torch.nn.functional as F
from torch import nn


class SharpnessAware:
    """Step at the worst point of a small ball around the weights (Foret et al., 2021)."""

    def __init__(self, base: torch.optim.Optimizer, rho=0.05):
        self.base = base
        self.rho = rho

    @property
    def params(self):
        return [p for g in self.base.param_groups for p in g["params"]]

    def zero_grad(self):
        self.base.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _climb(self):
        used = [p for p in self.params if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in used]).norm()
        saved = []
        for p in used:
            saved.append((p, p.detach().clone()))
            p.add_(p.grad, alpha=self.rho / (float(norm) + 1e-12))
        return saved

    def step(self, closure, max_norm=None):
        with torch.enable_grad():
            first = closure()
        saved = self._climb()
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for p, old in saved:
                p.copy_(old)
        if max_norm:
            nn.utils.clip_grad_norm_(self.params, max_norm)
        self.base.step()
        return first

    def state_dict(self):
        return self.base.state_dict()

    def load_state_dict(self, sd):
        self.base.load_state_dict(sd)


def freeze_norm_statistics(net, frozen):
    for m in net.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.momentum = 0.0 if frozen else 0.1


def train(net, loader, args):
    net = net.cuda()
    base = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    opt = SharpnessAware(base, args.rho)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(base, args.epochs * len(loader))
    for epoch in range(args.epochs):
        net.train()
        total = 0.0
        for image, label in loader:
            image, label = image.cuda(non_blocking=True), label.cuda(non_blocking=True)
            visits = 0

            def closure():
                nonlocal visits
                freeze_norm_statistics(net, visits > 0)
                visits += 1
                opt.zero_grad()
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    logits = net(image)
                loss = F.cross_entropy(logits.float(), label, label_smoothing=0.1)
                loss.backward()
                return loss.detach()

            total += opt.step(closure, max_norm=args.clip).item()
            sched.step()
        print(f"epoch {epoch}: {total / len(loader):.4f}")
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict()}, args.out)
    return net


def arguments(argv=None):
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--rho", type=float, default=0.05)
    p.add_argument("--clip", type=float, default=2.0)
    p.add_argument("--epochs", type=int, default=200)
    p.add_argument("--out", default="sam.pt")
    return p.parse_args(argv)
