# why correct: bfloat16 has float32's range, so the loss is back-propagated unscaled and clipping acts on true gradients
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

CTX, VOCAB, MICRO = 1024, 50304, 4


class Sub(nn.Module):
    def __init__(self, d=768, h=12):
        super().__init__()
        self.h = h
        self.a, self.b = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.dn = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.h, C // self.h).transpose(1, 2) for t in self.qkv(self.a(x)).split(C, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, C))
        return x + self.dn(F.gelu(self.up(self.b(x))))


class Small(nn.Module):
    def __init__(self, d=768, n=12):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, d), nn.Embedding(CTX, d)
        self.subs = nn.ModuleList(Sub(d) for _ in range(n))
        self.ln = nn.LayerNorm(d)

    def forward(self, ids, tgt):
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
        for s in self.subs:
            x = s(x)
        logits = F.linear(self.ln(x), self.wte.weight)
        return F.cross_entropy(logits.float().view(-1, VOCAB), tgt.view(-1))


def lr(i, peak=6e-4, warm=700, end=19_000):
    if i < warm:
        return peak * (i + 1) / warm
    t = min(1.0, (i - warm) / (end - warm))
    return 0.1 * peak + 0.45 * peak * (1 + math.cos(math.pi * t))


def main(steps=19_000):
    dist.init_process_group("nccl")
    dev = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(dev)
    from shards import batches

    raw = Small().to(dev)
    model = DistributedDataParallel(torch.compile(raw), device_ids=[dev])
    opt = torch.optim.AdamW(raw.parameters(), lr=lr(0), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    feed = batches(dist.get_rank())
    for i in range(steps):
        for g in opt.param_groups:
            g["lr"] = lr(i)
        total = torch.zeros((), device=dev)
        for m in range(MICRO):
            x, y = next(feed)
            model.require_backward_grad_sync = m == MICRO - 1
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x.to(dev), y.to(dev)) / MICRO
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        dist.all_reduce(total, dist.ReduceOp.AVG)
        if dev == 0 and i % 20 == 0:
            print(f"{i} {total.item():.4f} {norm.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
