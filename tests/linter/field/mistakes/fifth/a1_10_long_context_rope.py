# source: huggingface/diffusers PR #13922 (issue #13920); EleutherAI/gpt-neox issue #1003
# mistake: the rotary angles are formed by a matmul inside bfloat16 autocast, so positions are rounded to 8 significant bits and distant tokens receive the same angles
# severity: warning
import contextlib

import torch
import torch.nn as nn
import torch.nn.functional as F


class Rotary(nn.Module):
    def __init__(self, head_dim: int, theta: float = 500_000.0):
        super().__init__()
        freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self.register_buffer("freq", freq, persistent=False)

    def forward(self, positions):
        f = self.freq[None, :, None].expand(positions.size(0), -1, 1)
        p = positions[:, None, :].float()
        angles = torch.matmul(f, p).transpose(1, 2)  # <- here
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-b, a), dim=-1) * sin[:, None]


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, cos, sin):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class LongLM(nn.Module):
    def __init__(self, vocab=50_304, dim=1024, heads=16, depth=16):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rope = Rotary(dim // heads)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, positions):
        x = self.emb(ids)
        cos, sin = self.rope(positions)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def fit(batches, steps, use_bf16=True, device="cuda"):
    model = LongLM().to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    context = (
        (lambda: torch.autocast("cuda", dtype=torch.bfloat16)) if use_bf16 else contextlib.nullcontext  # <- here
    )
    for step, (ids, doc_positions) in zip(range(steps), batches):
        ids, doc_positions = ids.to(device), doc_positions.to(device)
        with context():
            logits = model(ids[:, :-1], doc_positions[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 100 == 0:
            print(step, loss.item())
    return model
