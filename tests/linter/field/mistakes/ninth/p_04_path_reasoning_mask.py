# source: NVIDIA/apex#1052
# mistake: float16 attention scores are filled with -1e9, which float16 cannot hold, so masked_fill raises an overflow error
# severity: error
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class PathAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.h = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, nodes, paths, path_mask):
        B, N, D = nodes.shape
        P = paths.size(1)
        q = self.q(nodes).view(B, N, self.h, -1).transpose(1, 2)
        k, v = self.kv(paths).chunk(2, -1)
        k = k.view(B, P, self.h, -1).transpose(1, 2)
        v = v.view(B, P, self.h, -1).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(~path_mask[:, None, None, :], -1e9)  # <- here
        mix = torch.softmax(scores, dim=-1)
        ctx = torch.matmul(mix, v).transpose(1, 2).reshape(B, N, D)
        return self.out(ctx)


class RelationModel(nn.Module):
    def __init__(self, vocab=30000, dim=256, heads=8, relations=97):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.enc = nn.GRU(dim, dim // 2, bidirectional=True, batch_first=True)
        self.attn = PathAttention(dim, heads)
        self.norm = nn.LayerNorm(dim)
        self.cls = nn.Bilinear(dim, dim, relations)

    def forward(self, ent_ids, path_ids, path_mask, head, tail):
        ents, _ = self.enc(self.emb(ent_ids))
        paths = self.emb(path_ids).mean(2)
        h = self.norm(ents + self.attn(ents, paths, path_mask))
        rows = torch.arange(h.size(0), device=h.device)
        return self.cls(h[rows, head], h[rows, tail])


def train(model, loader, epochs, device="cuda"):
    model.to(device).train()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    scaler = torch.cuda.amp.GradScaler()
    for ep in range(epochs):
        for ent, path, mask, head, tail, label in loader:
            ent, path, mask = ent.to(device), path.to(device), mask.to(device).bool()
            head, tail, label = head.to(device), tail.to(device), label.to(device)
            opt.zero_grad()
            with torch.autocast(device_type="cuda", dtype=torch.float16):
                logits = model(ent, path, mask, head, tail)
                loss = F.cross_entropy(logits, label)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
        print(f"epoch {ep}: {loss.item():.3f}")
