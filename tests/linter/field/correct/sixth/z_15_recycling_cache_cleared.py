# why correct: gradient-less recycling passes share the autocast region with the trained pass, but clear_autocast_cache() between them makes the weights be cast again with gradient
import random

import torch
from torch import nn


class PairBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.LayerNorm(c)
        self.a, self.b, self.o = nn.Linear(c, c), nn.Linear(c, c), nn.Linear(c, c)

    def forward(self, z):
        h = self.norm(z)
        with torch.autocast("cuda", enabled=False):
            mixed = torch.einsum("bikc,bjkc->bijc", self._f32(self.a, h), self._f32(self.b, h)) / z.shape[1]
        return z + self.o(mixed)

    @staticmethod
    def _f32(lin, x):
        return nn.functional.linear(x.float(), lin.weight.float(), lin.bias.float())


class Folder(nn.Module):
    def __init__(self, c=128, depth=8, bins=64):
        super().__init__()
        self.left, self.right = nn.Embedding(22, c), nn.Embedding(22, c)
        self.recycle = nn.LayerNorm(c)
        self.blocks = nn.Sequential(*[PairBlock(c) for _ in range(depth)])
        self.distogram = nn.Linear(c, bins)

    def _cycle(self, seq, previous):
        z = self.left(seq)[:, :, None] + self.right(seq)[:, None]
        return self.blocks(z + self.recycle(previous))

    def forward(self, seq, cycles):
        b, n = seq.shape
        z = torch.zeros(b, n, n, self.left.embedding_dim, device=seq.device)
        for i in range(cycles):
            last = i == cycles - 1
            with torch.set_grad_enabled(last and torch.is_grad_enabled()):
                if last:
                    torch.clear_autocast_cache()
                z = self._cycle(seq, z)
        return self.distogram(z + z.transpose(1, 2))


def step(model, optimizer, batch, max_cycles=4):
    cycles = random.randint(1, max_cycles)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(batch["seq"], cycles)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 2), batch["bins"].flatten(), ignore_index=-1)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.item()


def train(loader, steps=75_000):
    model = Folder().cuda().train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-6)
    sched = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 1000))
    for i, batch in zip(range(steps), loader):
        loss = step(model, optimizer, {k: v.cuda() for k, v in batch.items()})
        sched.step()
        if i % 50 == 0:
            print(i, loss)
