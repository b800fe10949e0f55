import torch
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


class CosineHead(nn.Module):
    def forward(self, a, b):
        a = a / (a.norm(dim=-1, keepdim=True) + 1e-8)
        b = b / b.float().norm(dim=-1, keepdim=True).clamp(min=1e-8)
        return a @ b.t()
