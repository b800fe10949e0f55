# why correct: rotary angles and the time embedding are computed in float32 with autocast off, and the rotation itself is done in float32 too
import math

import torch
import torch.nn.functional as F
from torch import nn


def time_features(t, dim, longest=10_000.0):
    with torch.autocast("cuda", enabled=False):
        rate = torch.exp(-math.log(longest) * torch.arange(dim // 2, device=t.device, dtype=torch.float32) / (dim // 2))
        arg = t.float()[:, None] * 1000.0 * rate[None]
        return torch.cat([arg.cos(), arg.sin()], -1)


class Rotary(nn.Module):
    def __init__(self, head_dim):
        super().__init__()
        self.register_buffer("rate", 10_000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim), persistent=False)

    @torch.autocast("cuda", enabled=False)
    def forward(self, n):
        place = torch.arange(n, device=self.rate.device, dtype=torch.float32)
        angle = place[:, None] @ self.rate.float()[None]
        angle = torch.cat([angle, angle], -1)
        return angle.cos(), angle.sin()


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))
        self.mod = nn.Linear(dim, 4 * dim)

    def turn(self, x, cos, sin):
        a, b = x.float().chunk(2, -1)
        return (x.float() * cos + torch.cat([-b, a], -1) * sin).to(x.dtype)

    def forward(self, x, cond, cos, sin):
        s1, b1, s2, b2 = self.mod(F.silu(cond))[:, None].chunk(4, -1)
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x) * (1 + s1) + b1).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.turn(q, cos, sin), self.turn(k, cos, sin), v)
        x = x + self.out(y.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.norm2(x) * (1 + s2) + b2)


class TrajectoryFlow(nn.Module):
    def __init__(self, coords=2, dim=384, heads=6, depth=8):
        super().__init__()
        self.dim = dim
        self.inp, self.out = nn.Linear(coords, dim), nn.Linear(dim, coords)
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.rotary = Rotary(dim // heads)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))

    def forward(self, x, t):
        cond = self.time(time_features(t, self.dim))
        h = self.inp(x)
        cos, sin = self.rotary(x.size(1))
        for layer in self.layers:
            h = layer(h, cond, cos, sin)
        return self.out(h)


def train(loader, epochs=100, lr=3e-4):
    net = TrajectoryFlow().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    for epoch in range(epochs):
        for path in loader:
            path = path.cuda().float()
            t = torch.rand(path.size(0), device="cuda")
            noise = torch.randn_like(path)
            w = t[:, None, None]
            with torch.autocast("cuda", dtype=torch.bfloat16):
                speed = net((1 - w) * noise + w * path, t)
            loss = F.mse_loss(speed.float(), path - noise)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        print(epoch, loss.item())
    return net
