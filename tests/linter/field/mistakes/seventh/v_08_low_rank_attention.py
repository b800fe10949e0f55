# source: tatp22/linformer-pytorch PR #19 https://github.com/tatp22/linformer-pytorch/pull/19
# mistake: attention scores are float16 under autocast and are filled with -1e10, which half cannot hold (raises on overflow)
# severity: error
import math

import torch
from torch import nn
from torch.amp import GradScaler, autocast


class CausalHeads(nn.Module):
    NEG = -1e10

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        att = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        att = att.masked_fill(future, self.NEG)  # <- here
        return self.proj((att.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.att = CausalHeads(dim, heads)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        x = x + self.att(self.n1(x))
        return x + self.ff(self.n2(x))


class ByteModel(nn.Module):
    def __init__(self, dim=512, depth=8, heads=8, ctx=1024):
        super().__init__()
        self.tok = nn.Embedding(256, dim)
        self.pos = nn.Embedding(ctx, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.out = nn.Linear(dim, 256)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        for blk in self.blocks:
            x = blk(x)
        return self.out(x)


def sample_batch(data, size=16, ctx=1024):
    at = torch.randint(0, len(data) - ctx - 1, (size,))
    chunk = torch.stack([data[i:i + ctx + 1] for i in at]).long().cuda()
    return chunk[:, :-1], chunk[:, 1:]


data = torch.frombuffer(bytearray(open("enwik8", "rb").read()), dtype=torch.uint8)
model = ByteModel().cuda()
opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
scaler = GradScaler("cuda")

for step in range(50_000):
    x, y = sample_batch(data)
    opt.zero_grad(set_to_none=True)
    with autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(opt)
    scaler.update()
    if step % 100 == 0:
        print(step, loss.item() / math.log(2))
