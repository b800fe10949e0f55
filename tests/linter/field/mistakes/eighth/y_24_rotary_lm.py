# source: https://github.com/EleutherAI/gpt-neox/pull/1016
# mistake: after model.bfloat16() the rotary inverse frequencies are bfloat16 and the positions inherit that dtype, so positions above 256 collapse and the angles are wrong.
# severity: warning
import torch
import torch.nn as nn
import torch.nn.functional as F


class Rotary(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        inv_freq = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq, persistent=False)  # <- here

    def forward(self, length, device):
        pos = torch.arange(length, device=device).type_as(self.inv_freq)  # <- here
        angle = torch.einsum("i,j->ij", pos, self.inv_freq)  # <- here
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos()[None, None], angle.sin()[None, None]  # <- here


def rotate(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1 = nn.LayerNorm(dim)
        self.n2 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, cos, sin):
        b, t, d = x.shape
        q, k, v = (m.view(b, t, self.heads, -1).transpose(1, 2) for m in self.qkv(self.n1(x)).chunk(3, -1))
        q = q * cos + rotate(q) * sin
        k = k * cos + rotate(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class LongLM(nn.Module):
    def __init__(self, vocab=50304, dim=1024, heads=16, depth=16):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.rotary = Rotary(dim // heads)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, labels=None):
        x = self.tok(ids)
        cos, sin = self.rotary(ids.shape[1], ids.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


class MasterAdamW:
    """AdamW on float32 copies; the working model stays in 16 bits."""

    def __init__(self, model, **kw):
        self.low = [p for p in model.parameters() if p.requires_grad]
        self.high = [p.detach().clone().float().requires_grad_() for p in self.low]
        self.inner = torch.optim.AdamW(self.high, **kw)

    def step(self, clip):
        for lo, hi in zip(self.low, self.high):
            hi.grad = lo.grad.float()
            lo.grad = None
        norm = nn.utils.clip_grad_norm_(self.high, clip)
        self.inner.step()
        self.inner.zero_grad()
        with torch.no_grad():
            for lo, hi in zip(self.low, self.high):
                lo.copy_(hi)
        return norm


def pretrain(batches, steps, length=4096):
    model = LongLM().bfloat16().cuda()  # <- here
    optimizer = MasterAdamW(model, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        ids = next(batches)[:, : length + 1].cuda()
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        norm = optimizer.step(clip=1.0)
        if step % 10 == 0:
            print(step, f"{loss.item():.4f}", f"{norm.item():.3f}")
    return model
