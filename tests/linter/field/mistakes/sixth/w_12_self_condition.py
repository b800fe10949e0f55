# source: pytorch/pytorch issue #105211 (reported from training BEVFormer with AMP)
# mistake: the first estimate is made under no_grad and the trained pass follows in the same autocast region, so the cached half weights don't require grad and most parameters get no gradient
# severity: error
import math
import random

import torch
from torch import nn


class TokenDenoiser(nn.Module):
    """Denoises analog bits of symbolic music; takes its own last estimate as a second input."""

    def __init__(self, bits=8, d=512, layers=8):
        super().__init__()
        self.inp = nn.Linear(2 * bits, d)
        self.time = nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d))
        layer = nn.TransformerEncoderLayer(d, 8, 4 * d, 0.1, batch_first=True, norm_first=True)
        self.trunk = nn.TransformerEncoder(layer, layers)
        self.out = nn.Linear(d, bits)
        self.d = d

    def embed_time(self, t):
        freqs = torch.exp(torch.arange(0, self.d, 2, device=t.device) * (-math.log(1e4) / self.d))
        ang = 1000.0 * t[:, None] * freqs[None]
        return torch.cat([ang.sin(), ang.cos()], -1)

    def forward(self, noisy, estimate, t):
        h = self.inp(torch.cat([noisy, estimate], -1))
        h = h + self.time(self.embed_time(t)).unsqueeze(1)
        return self.out(self.trunk(h))


def alpha_sigma(t):
    a = torch.cos(0.5 * math.pi * t)
    return a, (1 - a * a).clamp(min=0).sqrt()


def training_loss(net, x0):
    t = torch.rand(x0.size(0), device=x0.device)
    a, s = alpha_sigma(t)
    noisy = a[:, None, None] * x0 + s[:, None, None] * torch.randn_like(x0)
    estimate = torch.zeros_like(x0)
    with torch.autocast("cuda", dtype=torch.float16):  # <- here
        if random.random() < 0.5:
            with torch.no_grad():  # <- here
                estimate = net(noisy, estimate, t)  # <- here
        pred = net(noisy, estimate.to(x0.dtype), t)  # <- here
    return nn.functional.mse_loss(pred.float(), x0)


@torch.no_grad()
def sample(net, n, length, bits=8, steps=100, device="cuda"):
    net.eval()
    x = torch.randn(n, length, bits, device=device)
    est = torch.zeros_like(x)
    grid = torch.linspace(1, 0, steps + 1, device=device)
    for now, nxt in zip(grid[:-1], grid[1:]):
        with torch.autocast("cuda", dtype=torch.float16):
            est = net(x, est, now.expand(n)).float().clamp(-1, 1)
        (a, s), (a2, s2) = alpha_sigma(now), alpha_sigma(nxt)
        eps = (x - a * est) / s.clamp(min=1e-4)
        x = a2 * est + s2 * eps
    return x > 0


def main(loader, epochs=100, lr=1e-4):
    net = TokenDenoiser().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cuda")
    for ep in range(epochs):
        net.train()
        for ids in loader:
            bits = ((ids.cuda()[..., None] >> torch.arange(8, device="cuda")) & 1).float() * 2 - 1
            loss = training_loss(net, bits)
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
        print(ep, loss.item())
