"""
# source: https://github.com/facebookresearch/fairseq/issues/3575
# mistake: attention scores are float16 under autocast and -1e8 does not fit in float16, so masked_fill raises RuntimeError (value cannot be converted without overflow).
# severity: error
# torch: any
"""
import math

import torch
import torch.nn.functional as F
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, dim, heads, dropout=0.1):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.dropout = dropout

    def forward(self, x, attn_mask=None, padding_mask=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q / math.sqrt(self.head_dim), k.transpose(-2, -1))
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask.to(torch.bool), -1e8)  # <- here
        if padding_mask is not None:
            scores = scores.masked_fill(padding_mask[:, None, None, :], float("-inf"))
        probs = F.dropout(F.softmax(scores, dim=-1), self.dropout, self.training)
        return self.out(torch.matmul(probs, v).transpose(1, 2).reshape(b, t, d))


class EncoderLayer(nn.Module):
    def __init__(self, dim=512, heads=8, ffn=2048):
        super().__init__()
        self.attn = SelfAttention(dim, heads)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, ffn), nn.ReLU(), nn.Linear(ffn, dim))

    def forward(self, x, attn_mask, padding_mask):
        x = self.norm1(x + self.attn(x, attn_mask, padding_mask))
        return self.norm2(x + self.ffn(x))


class Tagger(nn.Module):
    def __init__(self, vocab, tags, layers=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, 512, padding_idx=1)
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(layers))
        self.out = nn.Linear(512, tags)

    def forward(self, tokens):
        band = torch.ones(tokens.size(1), tokens.size(1), device=tokens.device).triu(8)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, band, tokens.eq(1))
        return self.out(x)


def train(model, loader, steps):
    model = model.cuda().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98))
    scaler = torch.amp.GradScaler("cuda")
    for _, (tokens, tags) in zip(range(steps), loader):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(tokens.cuda())
            loss = F.cross_entropy(logits.transpose(1, 2), tags.cuda(), ignore_index=-100)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
