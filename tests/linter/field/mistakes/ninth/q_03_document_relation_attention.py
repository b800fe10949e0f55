# source: https://github.com/NVIDIA/apex/issues/1052
# mistake: under float16 autocast the attention scores are half and cannot hold -1e9, so masked_fill raises an overflow error
# severity: error
import math

import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast


class PathAttention(nn.Module):
    """Attends from entity pairs to the sentences that connect them."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, dim * 2)
        self.o = nn.Linear(dim, dim)

    def _split(self, t):
        b, n, _ = t.shape
        return t.view(b, n, self.heads, self.hd).transpose(1, 2)

    def forward(self, pairs, sentences, pad):
        k, v = self.kv(sentences).chunk(2, dim=-1)
        q, k, v = self._split(self.q(pairs)), self._split(k), self._split(v)
        energy = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.hd)
        energy = energy.masked_fill(pad[:, None, None, :], -1e9)  # <- here
        ctx = torch.matmul(energy.softmax(dim=-1), v)
        b, _, n, _ = ctx.shape
        return self.o(ctx.transpose(1, 2).reshape(b, n, -1))


class RelationModel(nn.Module):
    def __init__(self, vocab, dim=384, relations=97):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.rnn = nn.GRU(dim, dim // 2, bidirectional=True, batch_first=True)
        self.att = PathAttention(dim, 6)
        self.cls = nn.Linear(dim, relations)

    def forward(self, sent_ids, pair_repr):
        hidden, _ = self.rnn(self.emb(sent_ids))
        return self.cls(self.att(pair_repr, hidden, sent_ids.eq(0)))


def run_epoch(model, loader, optimizer, scaler, device):
    model.train()
    total = 0.0
    criterion = nn.BCEWithLogitsLoss()
    for sent_ids, pair_repr, labels in loader:
        sent_ids, pair_repr, labels = (t.to(device) for t in (sent_ids, pair_repr, labels))
        optimizer.zero_grad()
        with autocast():
            loss = criterion(model(sent_ids, pair_repr), labels.float())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
    return total / len(loader)


def fit(model, loader, epochs=30, lr=3e-4):
    device = torch.device("cuda")
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scaler = GradScaler()
    for epoch in range(epochs):
        print(epoch, run_epoch(model, loader, optimizer, scaler, device))
    torch.save(model.state_dict(), "relation.pt")
