# why correct: rotary angles are formed in float32 with autocast off from a plain (non-buffer) tensor and only cos/sin are cast to the activation dtype
import torch
import torch.nn as nn
import torch.nn.functional as F


class SafeRotary(nn.Module):
    def __init__(self, dim, base=500_000.0):
        super().__init__()
        self.dim, self.base = dim, base
        self._memo = {}

    def tables(self, n, device, dtype):
        key = (n, device, dtype)
        if key not in self._memo:
            with torch.autocast(device.type, enabled=False), torch.no_grad():
                freq = self.base ** (-torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)
                ang = torch.arange(n, device=device, dtype=torch.float32)[:, None] * freq[None]
                self._memo[key] = (ang.cos().to(dtype), ang.sin().to(dtype))
        return self._memo[key]

    def forward(self, x):
        cos, sin = self.tables(x.size(-2), x.device, x.dtype)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class GeneLayer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.rot = SafeRotary(d // h)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, n, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rot(q), self.rot(k), v)
        x = x + self.o(y.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.n2(x))


class GeneBert(nn.Module):
    def __init__(self, d=512, depth=12):
        super().__init__()
        self.emb = nn.Embedding(8, d)
        self.layers = nn.ModuleList(GeneLayer(d, 8) for _ in range(depth))
        self.head = nn.Linear(d, 8)

    def forward(self, ids):
        x = self.emb(ids)
        for l in self.layers:
            x = l(x)
        return self.head(x)


def masked(ids, p=0.15):
    pick = torch.rand(ids.shape, device=ids.device) < p
    return ids.masked_fill(pick, 7), torch.where(pick, ids, torch.full_like(ids, -100))


def main(stream, steps=50_000):
    net = GeneBert().cuda()
    opt = torch.optim.AdamW(net.parameters(), 4e-4)
    for step, ids in zip(range(steps), stream):
        x, y = masked(ids.cuda())
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = net(x)
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        if step % 250 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    from genome import windows

    main(windows(length=6000, batch=8))
