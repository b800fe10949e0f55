# why correct: unscaling, clipping, step and update happen once per accumulation group, and the shorter last group of an epoch is divided by its own size
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class BasketModel(nn.Module):
    def __init__(self, n_products, dim=192):
        super().__init__()
        self.bag = nn.EmbeddingBag(n_products, dim, mode="mean")
        self.trunk = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.out = nn.Linear(dim, n_products)

    def forward(self, products, offsets):
        return self.out(self.trunk(self.bag(products, offsets)))


def grouped(iterable, size):
    it = iter(iterable)
    while group := list(islice(it, size)):
        yield group


class Runner:
    def __init__(self, model, lr, group_size, max_norm=1.0):
        self.model = model.cuda()
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scaler = GradScaler()
        self.group_size, self.max_norm = group_size, max_norm

    def backward(self, batch, share):
        products, offsets, target = (t.cuda(non_blocking=True) for t in batch)
        with autocast():
            logits = self.model(products, offsets)
            loss = F.cross_entropy(logits, target) * share
        self.scaler.scale(loss).backward()
        return loss.detach()

    def commit(self):
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)

    def epoch(self, loader):
        self.model.train()
        total = torch.zeros((), device="cuda")
        groups = 0
        for group in grouped(loader, self.group_size):
            for batch in group:
                total += self.backward(batch, 1.0 / len(group))
            self.commit()
            groups += 1
        return (total / groups).item()


def train(loader, n_products, epochs=10):
    runner = Runner(BasketModel(n_products), lr=1e-3, group_size=6)
    for e in range(epochs):
        print(e, runner.epoch(loader))
    return runner.model
