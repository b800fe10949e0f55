# source: https://github.com/NVIDIA/apex/issues/1052
# mistake: attention scores are float16 under autocast and -1e9 is outside its range, so masked_fill raises "value cannot be converted to type at::Half without overflow"
# severity: error
import math

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class PathAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim)
        self.to_kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def split(self, t):
        b, n, d = t.shape
        return t.view(b, n, self.heads, d // self.heads).transpose(1, 2)

    def forward(self, mentions, paths, path_mask):
        q = self.split(self.to_q(mentions))
        k, v = (self.split(t) for t in self.to_kv(paths).chunk(2, dim=-1))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(~path_mask[:, None, None, :], -1e9)  # <- here
        mixed = torch.matmul(scores.softmax(dim=-1), v)
        b, h, n, d = mixed.shape
        return self.proj(mixed.transpose(1, 2).reshape(b, n, h * d))


class RelationModel(nn.Module):
    def __init__(self, dim=384, heads=6, n_rel=97):
        super().__init__()
        self.attn = PathAttention(dim, heads)
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, n_rel)

    def forward(self, mentions, paths, path_mask):
        h = self.norm(mentions + self.attn(mentions, paths, path_mask))
        return self.out(h.mean(dim=1))


def train_epoch(model, optimizer, scaler, batches, loss_fn):
    model.train()
    running = 0.0
    for mentions, paths, mask, target in batches:
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            logits = model(mentions.cuda(), paths.cuda(), mask.cuda())
            loss = loss_fn(logits, target.cuda())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        running += loss.item()
    return running / max(len(batches), 1)


def main(batches, epochs=30):
    model = RelationModel().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = GradScaler()
    loss_fn = nn.BCEWithLogitsLoss()
    for e in range(epochs):
        print(e, train_epoch(model, optimizer, scaler, batches, loss_fn))
