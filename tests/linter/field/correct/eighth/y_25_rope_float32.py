# why correct: the rotary angles are computed from freshly built float32 frequencies with autocast off, and only their cosines and sines are cast to the activation's type.
import torch
import torch.nn as nn
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torch.utils.checkpoint import checkpoint

from music.tokens import EventSet


def rope_tables(positions, dim, dtype, base=500000.0):
    with torch.autocast(device_type=positions.device.type, enabled=False):
        exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
        angle = positions.to(torch.float32)[..., None] * (base ** -exponent)
        return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rope(x, cos, sin):
    a, b = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = RMSNorm(dim), RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 8 * dim // 3 * 2, bias=False), nn.Linear(8 * dim // 3, dim, bias=False)

    def forward(self, x, positions):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        cos, sin = rope_tables(positions, q.shape[-1], q.dtype)
        y = F.scaled_dot_product_attention(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        gate, value = self.up(self.n2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * value)


class MusicLM(nn.Module):
    def __init__(self, vocab=2048, dim=768, heads=12, depth=12):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        pos = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        x = self.emb(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, pos, use_reentrant=False) if self.training else layer(x, pos)
        return self.head(self.norm(x))


def main():
    acc = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=8)
    model = MusicLM()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    loader = DataLoader(EventSet("lakh.bin", length=8192), 2, shuffle=True, num_workers=4, drop_last=True)
    model, opt, loader = acc.prepare(model, opt, loader)
    for epoch in range(4):
        for i, ids in enumerate(loader):
            with acc.accumulate(model):
                logits = model(ids[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
            if i % 200 == 0:
                acc.print(epoch, i, loss.item())
        acc.save_state(f"music/epoch{epoch}")


if __name__ == "__main__":
    main()
