# source: https://github.com/NVIDIA/apex/issues/1052
# mistake: attention scores that autocast makes float16 are filled with -1e9, which float16 cannot hold, so masked_fill raises an overflow error
# severity: error
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class HistoryAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, padding):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        blocked = future[None, None] | padding[:, None, None, :]
        scores = scores.masked_fill(blocked, -1e9)  # <- here
        weights = scores.softmax(dim=-1)
        mixed = (weights.to(v.dtype) @ v).transpose(1, 2).reshape(b, t, d)
        return self.out(mixed)


class NextItem(nn.Module):
    def __init__(self, n_items, dim=256, heads=4, blocks=2, max_len=200):
        super().__init__()
        self.items = nn.Embedding(n_items + 1, dim, padding_idx=0)
        self.places = nn.Parameter(torch.zeros(max_len, dim))
        self.attn = nn.ModuleList(HistoryAttention(dim, heads) for _ in range(blocks))
        self.ffn = nn.ModuleList(nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)) for _ in range(blocks))
        self.norm_a = nn.ModuleList(nn.LayerNorm(dim) for _ in range(blocks))
        self.norm_f = nn.ModuleList(nn.LayerNorm(dim) for _ in range(blocks))

    def forward(self, history):
        padding = history == 0
        x = self.items(history) + self.places[: history.shape[1]]
        for attn, ffn, na, nf in zip(self.attn, self.ffn, self.norm_a, self.norm_f):
            x = x + attn(na(x), padding)
            x = x + ffn(nf(x))
        return x @ self.items.weight.t()


def train(loader, n_items, epochs):
    model = NextItem(n_items).cuda()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98))
    scaler = torch.cuda.amp.GradScaler()
    for _ in range(epochs):
        for history, target in loader:
            history, target = history.cuda(), target.cuda()
            opt.zero_grad(set_to_none=True)
            with torch.cuda.amp.autocast(dtype=torch.float16):
                logits = model(history)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), ignore_index=0)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
    return model
