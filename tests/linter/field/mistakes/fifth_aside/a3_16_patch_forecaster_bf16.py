# source: https://github.com/workofart/ml-by-hand/pull/85
# mistake: weights are stored in bfloat16 and updated by plain AdamW at a learning rate of 1e-5 without float32 master weights, so most updates round away
# severity: warning
import argparse
import math

import torch
from torch import nn


class PatchForecaster(nn.Module):
    def __init__(self, patch=32, dim=768, depth=12, heads=12, horizon=96):
        super().__init__()
        self.patch = patch
        self.inp = nn.Linear(patch, dim)
        self.pos = nn.Parameter(torch.randn(1, 256, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, activation="gelu", batch_first=True, norm_first=True)
        self.trunk = nn.TransformerEncoder(layer, depth)
        self.out = nn.Linear(dim, horizon)

    def forward(self, series):
        patches = series.unfold(-1, self.patch, self.patch)
        h = self.inp(patches)
        h = self.trunk(h + self.pos[:, : h.shape[1]])
        return self.out(h[:, -1])


def standardise(past, future):
    mean = past.mean(-1, keepdim=True)
    std = past.std(-1, keepdim=True).clamp_min(1e-3)
    return (past - mean) / std, (future - mean) / std


def warmup_cosine(step, warmup, total):
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def finetune(args, batches):
    model = PatchForecaster()
    model.load_state_dict(torch.load(args.pretrained, map_location="cpu"))
    model.to("cuda", dtype=torch.bfloat16)  # <- here
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)  # <- here
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: warmup_cosine(s, 500, args.steps))
    model.train()
    for step in range(args.steps):
        past, future = next(batches)
        past, future = standardise(past.cuda(), future.cuda())
        forecast = model(past.to(torch.bfloat16))
        loss = nn.functional.l1_loss(forecast.float(), future)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()  # <- here
        schedule.step()
        if step % 100 == 0:
            print(f"step {step} mae {loss.item():.4f}")
    return model


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("--pretrained", required=True)
    p.add_argument("--steps", type=int, default=20_000)
    p.add_argument("--lr", type=float, default=1e-5)
    return p.parse_args()
