# why correct: gradients are clipped unit by unit and measured in a step hook that runs only after unscale_, before scaler.step
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F


class GradTools:
    def __init__(self, params, factor):
        self.params = list(params)
        self.factor = factor
        self.history = deque(maxlen=100)

    def norm(self):
        return torch.stack([p.grad.norm() for p in self.params if p.grad is not None]).norm()

    def agc(self):
        for p in self.params:
            if p.grad is None or p.ndim < 2:
                continue
            dims = tuple(range(1, p.ndim))
            w = p.detach().norm(dim=dims, keepdim=True).clamp_(min=1e-3) * self.factor
            g = p.grad.norm(dim=dims, keepdim=True)
            p.grad.mul_(torch.where(g > w, w / g.clamp(min=1e-6), torch.ones_like(g)))

    def __call__(self):
        self.history.append(self.norm())
        self.agc()


class NFBlock(nn.Module):
    def __init__(self, c, alpha=0.2):
        super().__init__()
        self.alpha = alpha
        self.f = nn.Sequential(nn.GELU(), nn.Conv2d(c, c, 3, padding=1), nn.GELU(), nn.Conv2d(c, c, 3, padding=1))

    def forward(self, x):
        return x + self.alpha * self.f(x)


def make(classes=10, c=64):
    return nn.Sequential(nn.Conv2d(3, c, 3, 2, 1), NFBlock(c), nn.Conv2d(c, 2 * c, 3, 2, 1), NFBlock(2 * c),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * c, classes))


def optimise(scaler, opt, before_step):
    scaler.unscale_(opt)
    before_step()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)


def main(loader, epochs=20):
    net = make().cuda()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    tools = GradTools(net.parameters(), 0.02)
    scaler = torch.amp.GradScaler("cuda")
    for e in range(epochs):
        for x, y in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(net(x.cuda()), y.cuda())
            scaler.scale(loss).backward()
            optimise(scaler, opt, tools)
        finite = [v for v in tools.history if torch.isfinite(v)]
        print(e, loss.item(), float(sum(finite) / max(len(finite), 1)))
