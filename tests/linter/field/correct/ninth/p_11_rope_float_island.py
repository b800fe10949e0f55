# why correct: the rotary angles are computed in float32 with autocast disabled, and only cos/sin are cast to the activations' bfloat16
import torch
import torch.nn as nn
import torch.nn.functional as F


class Rope(nn.Module):
    def __init__(self, dim, base=500000.0):
        super().__init__()
        self.dim, self.base = dim, base

    @torch.no_grad()
    def forward(self, x, positions):
        with torch.autocast(x.device.type, enabled=False):
            idx = torch.arange(0, self.dim, 2, device=x.device, dtype=torch.float32)
            inv = self.base ** (-idx / self.dim)
            ang = positions.float()[..., None] * inv
            ang = torch.cat([ang, ang], -1)
            cos, sin = ang.cos(), ang.sin()
        return cos.to(x.dtype), sin.to(x.dtype)


def apply_rope(x, cos, sin):
    half = x.size(-1) // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos[:, None] + turned * sin[:, None]


class Attn(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.o = nn.Linear(d, d, bias=False)

    def forward(self, x, cos, sin):
        B, T, D = x.shape
        q, k, v = (t.view(B, T, self.h, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(B, T, D))


class LM(nn.Module):
    def __init__(self, vocab=32000, d=1024, h=16, n=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.attn = nn.ModuleList(Attn(d, h) for _ in range(n))
        self.ff = nn.ModuleList(nn.Sequential(nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d)) for _ in range(n))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2 * n))
        self.rope = Rope(d // h)
        self.out = nn.Linear(d, vocab, bias=False)

    def forward(self, ids, positions):
        x = self.emb(ids)
        probe = x.new_empty(0, dtype=torch.bfloat16)
        cos, sin = self.rope(probe, positions)
        for i, (a, f) in enumerate(zip(self.attn, self.ff)):
            x = x + a(self.norms[2 * i](x), cos, sin)
            x = x + f(self.norms[2 * i + 1](x))
        return self.out(x)


def train(loader, steps):
    net = LM().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4, weight_decay=0.1)
    for step, (ids, pos) in zip(range(steps), loader):
        ids, pos = ids.cuda(), pos.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = net(ids[:, :-1], pos[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
