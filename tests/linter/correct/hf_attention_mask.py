import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(size, 3 * size)

    def forward(self, x, mask=None):
        b, t, c = x.shape
        q, k, v = self.qkv(x).split(c, dim=2)
        scores = q @ k.transpose(-2, -1) / (c // self.heads) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :] == 0, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype)
        return weights @ v


def causal(scores, t):
    return scores.masked_fill(torch.ones(t, t).triu(1).bool(), float("-inf"))
