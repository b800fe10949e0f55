# why correct: the mask value is the most negative number of the scores' own dtype, so it fits in float16, and no row is masked entirely
import math

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class SlotAttention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.h = heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)

    def _heads(self, x):
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def forward(self, x, pad):
        q, k, v = self._heads(self.q(x)), self._heads(self.k(x)), self._heads(self.v(x))
        att = (q @ k.transpose(-1, -2)) * (1.0 / math.sqrt(q.size(-1)))
        att = att.masked_fill(pad[:, None, None, :], torch.finfo(att.dtype).min)
        out = att.softmax(-1).to(v.dtype) @ v
        return self.o(out.transpose(1, 2).flatten(2))


class IntentModel(nn.Module):
    def __init__(self, vocab, dim=256, layers=4, intents=64):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.att = nn.ModuleList(SlotAttention(dim) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.cls = nn.Linear(dim, intents)

    def forward(self, ids):
        pad = ids.eq(0)
        pad[:, 0] = False
        x = self.emb(ids)
        for norm, att, mlp in zip(self.norms, self.att, self.mlp):
            x = x + att(norm(x), pad)
            x = x + mlp(x)
        return self.cls(x[:, 0])


def train_batch(model, optimizer, scaler, ids, label):
    optimizer.zero_grad(set_to_none=True)
    with autocast(dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(ids), label)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def main(loader, vocab):
    model = IntentModel(vocab).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    scaler = GradScaler()
    for epoch in range(10):
        values = [train_batch(model, optimizer, scaler, ids.cuda(), y.cuda()) for ids, y in loader]
        print(epoch, sum(values) / len(values))
