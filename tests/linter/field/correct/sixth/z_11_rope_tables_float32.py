# why correct: bfloat16 only through autocast; the rotary angles are computed from float32 positions with autocast off and just the finished sin/cos are cast
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class RotaryTable(nn.Module):
    def __init__(self, dim, theta=500_000.0):
        super().__init__()
        self.dim, self.theta = dim, theta
        self._cache = None

    @torch.no_grad()
    def forward(self, length, device, dtype):
        if self._cache is None or self._cache.shape[1] < length or self._cache.device != device:
            with torch.autocast(device.type, enabled=False):
                inv = self.theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim)
                ang = torch.outer(torch.arange(length, dtype=torch.float32, device=device), inv)
                self._cache = torch.stack([ang.cos(), ang.sin()])
        cos, sin = self._cache[:, :length].to(dtype)
        return cos, sin


def rotate(x, cos, sin):
    a, b = x.float().chunk(2, -1)
    cos, sin = cos.float(), sin.float()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).type_as(x)


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((d, 3 * d), (d, 3 * d), (3 * d, d)))

    def forward(self, x, cos, sin):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class GenomeLM(nn.Module):
    def __init__(self, vocab=16, d=768, h=12, depth=12):
        super().__init__()
        self.emb, self.rope = nn.Embedding(vocab, d), RotaryTable(d // h)
        self.blocks = nn.ModuleList(Block(d, h) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        cos, sin = self.rope(ids.shape[1], ids.device, torch.float32)
        x = self.emb(ids)
        for blk in self.blocks:
            x = blk(x, cos, sin)
        return self.head(self.norm(x))


def cosine(step, warm, total, floor=0.1):
    if step < warm:
        return (step + 1) / warm
    p = min(1.0, (step - warm) / (total - warm))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * p))


def main(stream, total=50_000):
    model = GenomeLM().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: cosine(s, 1000, total))
    for step, ids in zip(range(total), stream):
        ids = ids.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        if step % 100 == 0:
            print(step, loss.item())
