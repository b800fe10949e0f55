# re-expressed from github.com/d8ahazard/sd_dreambooth_extension pull 1415: the averaged copy lived in 16-bit, so nearly every averaging update was rounded away
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from latents import LatentFolder


def timestep_embedding(t, dim, max_period=10_000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    args = t.float()[:, None] * freqs[None] * 1000.0
    return torch.cat([args.cos(), args.sin()], dim=-1)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.ada = nn.Linear(dim, 6 * dim)
        self.heads = heads

    def forward(self, x, c):
        s1, b1, g1, s2, b2, g2 = self.ada(F.silu(c))[:, None].chunk(6, dim=-1)
        q, k, v = self.qkv(self.norm1(x) * (1 + s1) + b1).chunk(3, dim=-1)
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in (q, k, v))
        x = x + g1 * self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + g2 * self.mlp(self.norm2(x) * (1 + s2) + b2)


class VelocityNet(nn.Module):
    def __init__(self, cin=4, dim=768, depth=12, heads=12, tokens=1024):
        super().__init__()
        self.inp, self.out = nn.Linear(cin, dim), nn.Linear(dim, cin)
        self.pos = nn.Parameter(torch.randn(1, tokens, dim) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))

    def forward(self, x, t):
        b, c, h, w = x.shape
        tok = self.inp(x.flatten(2).transpose(1, 2)) + self.pos
        cond = self.time(timestep_embedding(t, 256))
        for blk in self.blocks:
            tok = blk(tok, cond)
        return self.out(tok).transpose(1, 2).reshape(b, c, h, w)


class AveragedWeights:
    def __init__(self, model, decay=0.9999):
        self.decay = decay
        self.shadow = {k: v.detach().to(torch.bfloat16).clone() for k, v in model.state_dict().items()}  # <- here

    @torch.no_grad()
    def update(self, model):
        for k, v in model.state_dict().items():
            self.shadow[k].lerp_(v.to(self.shadow[k].dtype), 1.0 - self.decay)  # <- here

    def state_dict(self):
        return self.shadow


def main():
    device = torch.device("cuda")
    torch.manual_seed(0)
    os.makedirs("ckpt", exist_ok=True)
    model = VelocityNet().to(device)
    ema = AveragedWeights(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0)
    loader = DataLoader(LatentFolder("latents/train"), 64, shuffle=True, num_workers=8, drop_last=True)

    step = 0
    for epoch in range(400):
        for x1 in loader:
            x1 = x1.to(device, non_blocking=True)
            x0 = torch.randn_like(x1)
            t = torch.sigmoid(torch.randn(x1.size(0), device=device))
            tt = t.view(-1, 1, 1, 1)
            xt = (1 - tt) * x0 + tt * x1
            with torch.autocast("cuda", dtype=torch.bfloat16):
                v = model(xt, t)
            loss = F.mse_loss(v.float(), x1 - x0)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            ema.update(model)
            step += 1
            if step % 100 == 0:
                print(f"{step} {loss.item():.4f}")
        torch.save({"model": model.state_dict(), "ema": ema.state_dict(), "step": step}, f"ckpt/{epoch:04d}.pt")


if __name__ == "__main__":
    main()
