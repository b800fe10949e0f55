# why correct: masking takes the lowest number of the scores' own dtype and only after they were cast to float32; -1e9 is used solely on float32 logits
import math

import torch
from torch import nn


class BiasedAttention(nn.Module):
    """Attention over molecules' atoms with a pairwise bias and padding."""

    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)

    def forward(self, x, bias, keep):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        score = (q / math.sqrt(d // self.heads)) @ k.transpose(-1, -2)
        score = score.float() + bias.float()
        score = score.masked_fill(~keep[:, None, None, :], torch.finfo(score.dtype).min)
        weight = score.softmax(-1).to(v.dtype)
        return self.proj((weight @ v).transpose(1, 2).reshape(b, n, d))


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.att = BiasedAttention(d, heads)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x, bias, keep):
        x = x + self.att(self.n1(x), bias, keep)
        return x + self.ff(self.n2(x))


class SiteSelector(nn.Module):
    """Which atom reacts? One distribution over the atoms of each molecule."""

    def __init__(self, atoms=64, d=256, heads=8, depth=6, hops=20):
        super().__init__()
        self.atom = nn.Embedding(atoms, d, padding_idx=0)
        self.hop = nn.Embedding(hops + 1, heads)
        self.layers = nn.ModuleList(Layer(d, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(d)
        self.score = nn.Linear(d, 1)
        self.hops = hops

    def forward(self, z, dist):
        keep = z != 0
        bias = self.hop(dist.clamp(max=self.hops)).permute(0, 3, 1, 2)
        h = self.atom(z)
        for layer in self.layers:
            h = layer(h, bias, keep)
        logits = self.score(self.norm(h)).squeeze(-1).float()
        return logits.masked_fill(~keep, -1e9)


def train(loader, epochs=50, dtype=torch.float16):
    net = SiteSelector().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    for epoch in range(epochs):
        net.train()
        hit = n = 0
        for z, dist, site in loader:
            z, dist, site = z.cuda(), dist.cuda(), site.cuda()
            with torch.autocast("cuda", dtype=dtype):
                logits = net(z, dist)
                loss = nn.functional.cross_entropy(logits, site)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            hit += (logits.argmax(-1) == site).sum().item()
            n += len(site)
        print(f"{epoch}: top-1 {hit / n:.3f}")
    return net
