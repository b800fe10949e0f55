# why correct: bfloat16 autocast needs no GradScaler, the weights stay float32 and the EMA is kept and updated in float32
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn


class Ema:
    def __init__(self, net, decay):
        self.net = copy.deepcopy(net).float().eval().requires_grad_(False)
        self.decay = decay
        self.n = 0

    @torch.no_grad()
    def absorb(self, net):
        self.n += 1
        d = min(self.decay, (1 + self.n) / (10 + self.n))
        for e, p in zip(self.net.parameters(), net.parameters()):
            e.lerp_(p.float(), 1 - d)
        for e, b in zip(self.net.buffers(), net.buffers()):
            e.copy_(b)


class TimeEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("freqs", torch.exp(-math.log(1e4) * torch.arange(dim // 2).float() / (dim // 2)))

    def forward(self, t):
        with torch.autocast("cuda", enabled=False):
            a = t.float()[:, None] * self.freqs[None]
            return torch.cat([a.sin(), a.cos()], -1)


class Denoiser(nn.Module):
    def __init__(self, dim=64, width=768):
        super().__init__()
        self.time = TimeEmbedding(width)
        self.inp = nn.Linear(dim, width)
        self.body = nn.Sequential(*[nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(6)])
        self.out = nn.Linear(width, dim)

    def forward(self, x, t):
        return self.out(self.body(self.inp(x) + self.time(t)))


def loss_fn(net, x0, abar):
    t = torch.randint(0, abar.numel(), (x0.size(0),), device=x0.device)
    a = abar[t][:, None]
    eps = torch.randn_like(x0)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        pred = net(a.sqrt() * x0 + (1 - a).sqrt() * eps, t)
    return F.mse_loss(pred.float(), eps)


def optimise(net, opt, loss, ema):
    opt.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    ema.absorb(net)


def main(loader, epochs=100):
    net = Denoiser().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-4)
    ema = Ema(net, 0.9999)
    abar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device="cuda"), 0)
    for epoch in range(epochs):
        for x0 in loader:
            loss = loss_fn(net, x0.cuda(), abar)
            optimise(net, opt, loss, ema)
        print(epoch, loss.item())
        torch.save({"net": net.state_dict(), "ema": ema.net.state_dict(), "opt": opt.state_dict()}, "denoiser.pt")
