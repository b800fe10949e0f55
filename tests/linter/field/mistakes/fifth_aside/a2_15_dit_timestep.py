# source: https://github.com/modelscope/DiffSynth-Studio/pull/1025
# mistake: time steps in 0..1000 are rounded to bfloat16 (8 bits of mantissa) before the sinusoidal embedding, so neighbouring steps get the same embedding
# severity: warning
import math

import torch
import torch.nn.functional as F
from torch import nn


class TimeEmbed(nn.Module):
    def __init__(self, dim, inner=256, max_period=10_000):
        super().__init__()
        self.inner, self.max_period = inner, max_period
        self.mlp = nn.Sequential(nn.Linear(inner, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t):
        half = self.inner // 2
        k = torch.arange(half, device=t.device, dtype=torch.float32) / half
        angle = t[:, None] * torch.exp(-math.log(self.max_period) * k)[None]  # <- here
        wave = torch.cat([angle.cos(), angle.sin()], dim=-1)
        return self.mlp(wave.to(self.mlp[0].weight.dtype))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.n2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.mod = nn.Linear(dim, 4 * dim)

    def forward(self, x, c):
        s1, b1, s2, b2 = self.mod(F.silu(c))[:, None].chunk(4, -1)
        b, n, d = x.shape
        h = self.n1(x) * (1 + s1) + b1
        q, k, v = self.qkv(h).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + self.proj(a)
        return x + self.ff(self.n2(x) * (1 + s2) + b2)


class Backbone(nn.Module):
    def __init__(self, cin=16, dim=768, depth=12, heads=12, tokens=256):
        super().__init__()
        self.inp = nn.Linear(cin, dim)
        self.pos = nn.Parameter(torch.randn(1, tokens, dim) * 0.02)
        self.time = TimeEmbed(dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.out = nn.Linear(dim, cin)

    def forward(self, x, t):
        h, c = self.inp(x) + self.pos, self.time(t)
        for blk in self.blocks:
            h = blk(h, c)
        return self.out(h)


class Flow:
    def __init__(self, shift=3.0, n=1000):
        s = torch.linspace(1.0, 1.0 / n, n, dtype=torch.float64)
        self.sigmas = (shift * s / (1 + (shift - 1) * s)).float()
        self.timesteps = self.sigmas * n


def training_loop(model, flow, loader, opt, device="cuda", dtype=torch.bfloat16):
    model.to(device).train()
    for tokens in loader:
        tokens = tokens.to(device)
        noise = torch.randn_like(tokens)
        pick = torch.randint(0, len(flow.timesteps), (len(tokens),))
        timestep = flow.timesteps[pick].to(device=device, dtype=dtype)  # <- here
        sigma = flow.sigmas[pick].to(device)[:, None, None]
        noisy = (1 - sigma) * tokens + sigma * noise
        with torch.autocast("cuda", dtype=dtype):
            pred = model(noisy, timestep)  # <- here
        loss = F.mse_loss(pred.float(), noise - tokens)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        yield loss.detach()
