# why correct: Accelerate scales in acc.backward, unscales in acc.clip_grad_norm_ (only when gradients are synced) and skips optimizer calls between; no scaler of one's own
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from products import pair_loader


class TwoTower(nn.Module):
    def __init__(self, vocab=30_000, dim=256):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, 512, mode="mean", padding_idx=0)
        self.mlp = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, dim))
        self.log_t = nn.Parameter(torch.tensor(2.6))

    def embed(self, ids):
        return F.normalize(self.mlp(self.bag(ids)).float(), dim=-1, eps=1e-6)

    def forward(self, q, d):
        return self.embed(q), self.embed(d), self.log_t.clamp(max=4.6).exp()


def info_nce(a, b, t):
    logits = t * a @ b.t()
    y = torch.arange(len(a), device=a.device)
    return 0.5 * (F.cross_entropy(logits, y) + F.cross_entropy(logits.t(), y))


@torch.no_grad()
def recall(acc, net, loader):
    net.eval()
    hit = torch.zeros((), device=acc.device)
    n = torch.zeros_like(hit)
    for q, d in loader:
        a, b, _ = net(q, d)
        hit += ((a @ b.t()).argmax(1) == torch.arange(len(a), device=a.device)).sum()
        n += len(a)
    hit, n = acc.reduce(hit), acc.reduce(n)
    net.train()
    return (hit / n).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--mixed", default="fp16", choices=["no", "fp16", "bf16"])
    ap.add_argument("--accumulate", type=int, default=2)
    ap.add_argument("--epochs", type=int, default=4)
    args = ap.parse_args()
    acc = Accelerator(mixed_precision=args.mixed, gradient_accumulation_steps=args.accumulate)
    net = TwoTower()
    opt = torch.optim.AdamW(net.parameters(), 5e-4)
    train, val = pair_loader("train", 512), pair_loader("val", 512)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * len(train) // args.accumulate)
    net, opt, train, val, sched = acc.prepare(net, opt, train, val, sched)
    for e in range(args.epochs):
        for q, d in train:
            with acc.accumulate(net):
                a, b, t = net(q, d)
                loss = info_nce(a, b, t)
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
        acc.print(e, loss.item(), recall(acc, net, val))
        acc.save_state(f"state_{e}")


if __name__ == "__main__":
    main()
