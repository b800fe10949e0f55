# source: https://github.com/EleutherAI/gpt-neox/issues/1003
# mistake: positions and rotary angles are computed in bfloat16, where integers above 256 and their angles are rounded by whole radians
# severity: warning
import torch
import torch.nn as nn
import torch.nn.functional as F


class Rotary(nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        inv = base ** (-torch.arange(0, head_dim, 2).float() / head_dim)
        self.register_buffer("inv", inv, persistent=False)

    def tables(self, length, like):
        pos = torch.arange(length, device=like.device, dtype=torch.bfloat16)  # <- here
        angle = pos[:, None] * self.inv.to(torch.bfloat16)[None, :]  # <- here
        return angle.cos()[None, None], angle.sin()[None, None]  # <- here

    def forward(self, q, k):
        cos, sin = self.tables(q.shape[-2], q)  # <- here
        return self._turn(q, cos, sin), self._turn(k, cos, sin)

    @staticmethod
    def _turn(x, cos, sin):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.rot = Rotary(dim // heads)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = self.rot(q, k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class Decoder(nn.Module):
    def __init__(self, vocab=32000, dim=1024, depth=16, heads=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def train(batches, context=8192, lr=3e-4):
    model = Decoder().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    for ids in batches:
        ids = ids[:, : context + 1].cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    return model
