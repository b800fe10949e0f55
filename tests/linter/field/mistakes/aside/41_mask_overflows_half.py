# source: https://github.com/NVIDIA/apex/issues/1052
# mistake: under autocast the attention scores are float16 and -1e9 does not fit, so masked_fill raises RuntimeError.
# severity: error
# torch: any
import math

import torch
import torch.nn as nn


class PathAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.dim = hidden // heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x, pad_mask):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.dim).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.dim)
        scores = scores.masked_fill(pad_mask[:, None, None, :], -1e9)  # <- here
        attn = scores.softmax(dim=-1)
        return self.out(torch.matmul(attn, v).transpose(1, 2).reshape(b, n, -1))


class RelationModel(nn.Module):
    def __init__(self, vocab, n_rel, hidden=256, layers=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, hidden, padding_idx=0)
        self.blocks = nn.ModuleList(PathAttention(hidden, 8) for _ in range(layers))
        self.cls = nn.Linear(hidden, n_rel)

    def forward(self, ids):
        pad = ids.eq(0)
        h = self.emb(ids)
        for block in self.blocks:
            h = h + block(h, pad)
        return self.cls(h[:, 0])


def train(model, loader, epochs):
    model.cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(epochs):
        for ids, rel in loader:
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.binary_cross_entropy_with_logits(model(ids.cuda()), rel.cuda())
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
