# why correct: the dtype flag reaches autocast, and the scaler is enabled for float16 only; with bfloat16 all scaler calls are no-ops
import argparse
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

PRECISION = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def context(device, dtype):
    if dtype is None:
        return nullcontext()
    return torch.autocast(device_type=device, dtype=dtype)


class Recommender(nn.Module):
    def __init__(self, items=200_000, dim=256):
        super().__init__()
        self.items = nn.Embedding(items + 1, dim, padding_idx=0)
        self.rnn = nn.GRU(dim, dim, 2, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, history):
        h, _ = self.rnn(self.items(history))
        return self.norm(h)

    def scores(self, h, candidates):
        return torch.einsum("bld,blkd->blk", h, self.items(candidates))


def sampled_loss(model, hist, pos, neg):
    h = model(hist)
    s = model.scores(h, torch.cat([pos.unsqueeze(-1), neg], -1))
    keep = pos != 0
    target = torch.zeros_like(pos)
    return F.cross_entropy(s[keep].float(), target[keep])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--precision", choices=list(PRECISION), default="bf16")
    ap.add_argument("--accumulate", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=5)
    args = ap.parse_args()
    from sessions import loader

    dtype = PRECISION[args.precision]
    model = Recommender().cuda()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    data = loader(batch=512)
    for e in range(args.epochs):
        opt.zero_grad(set_to_none=True)
        for i, (hist, pos, neg) in enumerate(data, 1):
            with context("cuda", dtype):
                loss = sampled_loss(model, hist.cuda(), pos.cuda(), neg.cuda()) / args.accumulate
            scaler.scale(loss).backward()
            if i % args.accumulate and i != len(data):
                continue
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
        print(f"epoch {e} loss {loss.item() * args.accumulate:.4f}")
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict()}, "rec.pt")


if __name__ == "__main__":
    main()
