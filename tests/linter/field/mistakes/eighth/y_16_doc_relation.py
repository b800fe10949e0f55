# source: https://github.com/NVIDIA/apex/issues/1052
# mistake: attention scores are float16 under autocast and are masked with -1e9, which float16 cannot hold: masked_fill raises "value cannot be converted to type at::Half without overflow".
# severity: error
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast


class PathAttention(nn.Module):
    """Attends from an entity pair to the evidence paths which connect it."""

    def __init__(self, dim, heads=4, drop=0.1):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, pair, path, valid):
        b, n, d = path.shape
        h = self.heads
        q = self.q(pair).view(b, 1, h, d // h).transpose(1, 2)
        k, v = self.kv(path).chunk(2, dim=-1)
        k = k.view(b, n, h, d // h).transpose(1, 2)
        v = v.view(b, n, h, d // h).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(d // h)
        scores = scores.masked_fill(~valid[:, None, None, :], -1e9)  # <- here
        attn = self.drop(F.softmax(scores, dim=-1))
        mixed = torch.matmul(attn, v).transpose(1, 2).reshape(b, d)
        return self.out(mixed)


class RelationModel(nn.Module):
    def __init__(self, vocab, relations, dim=256):
        super().__init__()
        self.words = nn.Embedding(vocab, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, dim // 2, num_layers=2, batch_first=True, bidirectional=True)
        self.attend = PathAttention(dim)
        self.score = nn.Linear(2 * dim, relations)

    def forward(self, tokens, head, tail, paths, path_valid):
        states, _ = self.lstm(self.words(tokens))
        rows = torch.arange(len(tokens), device=tokens.device)
        pair = states[rows, head] * states[rows, tail]
        nodes = states[rows[:, None], paths]
        ctx = self.attend(pair, nodes, path_valid)
        return self.score(torch.cat([pair, ctx], dim=-1))


def train(loader, valid_loader, vocab, relations, epochs=20, lr=1e-3):
    model = RelationModel(vocab, relations).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    scaler = GradScaler()
    for epoch in range(epochs):
        model.train()
        running = 0.0
        for batch in loader:
            tokens, head, tail, paths, path_valid, labels = (t.cuda() for t in batch)
            optimizer.zero_grad()
            with autocast():
                logits = model(tokens, head, tail, paths, path_valid)
                loss = F.binary_cross_entropy_with_logits(logits, labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            running += loss.item()
        print(f"epoch {epoch} loss {running / len(loader):.4f} micro-f1 {evaluate(model, valid_loader):.4f}")
    return model


@torch.no_grad()
def evaluate(model, loader, threshold=0.0):
    model.eval()
    tp = fp = fn = 0
    for batch in loader:
        *inputs, labels = (t.cuda() for t in batch)
        with autocast():
            logits = model(*inputs)
        pred, gold = logits > threshold, labels > 0.5
        tp += (pred & gold).sum().item()
        fp += (pred & ~gold).sum().item()
        fn += (~pred & gold).sum().item()
    return 2 * tp / max(2 * tp + fp + fn, 1)
