import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

config = dict(vocab=32000, dim=512, heads=8, layers=6, ctx=512, lr=3e-4, batch_size=16, steps=20000, clip=1.0)


class CausalSelfAttention(nn.Module):
    def __init__(self, dim, heads, ctx):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.register_buffer("mask", torch.tril(torch.ones(ctx, ctx, dtype=torch.bool)), persistent=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        att = (q @ k.transpose(-2, -1)) / math.sqrt(c // self.heads)
        att = att.masked_fill(~self.mask[:t, :t], -1e9)  # <- here
        att = F.softmax(att, dim=-1)
        y = (att.to(v.dtype) @ v).transpose(1, 2).reshape(b, t, c)
        return self.proj(y)


class Block(nn.Module):
    def __init__(self, dim, heads, ctx):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = CausalSelfAttention(dim, heads, ctx)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tok = nn.Embedding(cfg["vocab"], cfg["dim"])
        self.pos = nn.Embedding(cfg["ctx"], cfg["dim"])
        self.blocks = nn.ModuleList(Block(cfg["dim"], cfg["heads"], cfg["ctx"]) for _ in range(cfg["layers"]))
        self.ln = nn.LayerNorm(cfg["dim"])
        self.head = nn.Linear(cfg["dim"], cfg["vocab"], bias=False)

    def forward(self, idx):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1), device=idx.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def main(cfg):
    tokens = torch.load("train_tokens.pt")
    n = (len(tokens) - 1) // cfg["ctx"]
    data = TensorDataset(tokens[:n * cfg["ctx"]].view(n, -1), tokens[1:n * cfg["ctx"] + 1].view(n, -1))
    loader = DataLoader(data, cfg["batch_size"], shuffle=True, drop_last=True)
    model = GPT(cfg).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=cfg["lr"], betas=(0.9, 0.95))
    scaler = torch.cuda.amp.GradScaler()
    step = 0
    while step < cfg["steps"]:
        for x, y in loader:
            x, y = x.cuda(), y.cuda()
            with torch.autocast(device_type="cuda", dtype=torch.float16):
                logits = model(x)
                loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), cfg["clip"])
            scaler.step(opt)
            scaler.update()
            if step % 100 == 0:
                print(step, loss.item())
            step += 1


if __name__ == "__main__":
    main(config)
