# source: https://github.com/pyg-team/pytorch_geometric/pull/2106
# mistake: the guard 1e-15 is added to half-precision probabilities, where it is zero, so log(0) gives infinite losses
# severity: error
import argparse

import torch
import torch.nn as nn
from torch.cuda import amp

EPS = 1e-15  # <- here


class PairEncoder(nn.Module):
    def __init__(self, n_users, n_items, dim=128):
        super().__init__()
        self.user = nn.Embedding(n_users, dim)
        self.item = nn.Embedding(n_items, dim)
        self.mix = nn.Sequential(nn.Linear(dim * 2, dim), nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, u, i):
        z = torch.cat([self.user(u), self.item(i)], dim=-1)
        return torch.sigmoid(self.mix(z)).squeeze(-1)


def recon_loss(model, pos, neg):
    p = model(*pos)
    n = model(*neg)
    hit = -torch.log(p + EPS).mean()  # <- here
    miss = -torch.log(1 - n + EPS).mean()  # <- here
    return hit + miss


def negatives(pos, n_items):
    return pos[0], torch.randint(0, n_items, pos[1].shape, device=pos[1].device)


@torch.no_grad()
def hits_at(model, pairs, n_items, k=20):
    model.eval()
    good = 0
    items = torch.arange(n_items, device="cuda")
    for u, i in pairs:
        scores = model(torch.full_like(items, u), items)
        good += int(i in scores.topk(k).indices)
    return good / len(pairs)


def main(edges, held_out):
    ap = argparse.ArgumentParser()
    ap.add_argument("--users", type=int, required=True)
    ap.add_argument("--items", type=int, required=True)
    ap.add_argument("--epochs", type=int, default=50)
    ap.add_argument("--batch", type=int, default=65536)
    args = ap.parse_args()

    model = PairEncoder(args.users, args.items).cuda()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = amp.GradScaler()
    edges = edges.cuda()
    for epoch in range(args.epochs):
        model.train()
        for idx in torch.randperm(edges.shape[1], device="cuda").split(args.batch):
            pos = edges[0, idx], edges[1, idx]
            neg = negatives(pos, args.items)
            opt.zero_grad()
            with amp.autocast():
                loss = recon_loss(model, pos, neg)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        print(epoch, loss.item(), hits_at(model, held_out, args.items))
