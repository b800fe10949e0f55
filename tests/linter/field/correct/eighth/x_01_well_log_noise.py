# why correct: the scaler unscales once, right after the backward pass, and only then noise is added and the norm is limited
"""Lithology from well logs, with annealed gradient noise."""
import torch
import torch.nn as nn
import torch.nn.functional as F

CONFIG = {"curves": 7, "classes": 12, "width": 192, "layers": 6, "lr": 2e-3, "epochs": 60, "noise": 0.05, "max_norm": 2.0}


class DilatedStack(nn.Module):
    def __init__(self, curves, classes, width, layers):
        super().__init__()
        self.inp = nn.Conv1d(curves, width, 1)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 3, padding=2**i, dilation=2**i) for i in range(layers))
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(layers))
        self.out = nn.Conv1d(width, classes, 1)

    def forward(self, x):
        h = self.inp(x)
        for conv, norm in zip(self.convs, self.norms):
            h = h + F.gelu(norm(conv(h)))
        return self.out(h)


def noise_hook(params, std):
    def apply(_step):
        for p in params:
            if p.grad is not None:
                p.grad.add_(torch.randn_like(p.grad) * std(_step))

    return apply


def clip_hook(params, limit):
    return lambda _step: nn.utils.clip_grad_norm_(params, limit)


class SteppedOptimizer:
    """Optimizer, scaler and a list of functions which look at the true gradients before the step."""

    def __init__(self, optimizer, hooks, enabled=True):
        self.optimizer = optimizer
        self.hooks = hooks
        self.scaler = torch.amp.GradScaler("cuda", enabled=enabled)
        self.steps = 0

    def minimise(self, loss):
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        for hook in self.hooks:
            hook(self.steps)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.steps += 1


def main(loader, cfg=CONFIG):
    net = DilatedStack(cfg["curves"], cfg["classes"], cfg["width"], cfg["layers"]).cuda()
    params = list(net.parameters())
    hooks = [
        noise_hook(params, lambda s: cfg["noise"] / (1 + s) ** 0.55),
        clip_hook(params, cfg["max_norm"]),
    ]
    stepped = SteppedOptimizer(torch.optim.AdamW(params, cfg["lr"]), hooks)
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(stepped.optimizer, cfg["epochs"])
    for epoch in range(cfg["epochs"]):
        for curves, rock in loader:
            with torch.autocast("cuda", torch.float16):
                loss = F.cross_entropy(net(curves.cuda()), rock.cuda(), ignore_index=-1)
            stepped.minimise(loss)
        plan.step()
        print(epoch, float(loss))
    return net
