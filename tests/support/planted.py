"""Small models with a fault planted at a known place, and healthy twins."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ampaudit import scan

WIDTH = 16

# CUDA autocast, which has no measured rules to keep a fault from happening
scan_under_autocast = partial(scan, policy="torch-cuda")


class Branch(nn.Module):
    """Norm, linear, ReLU, linear; the first linear's output is ``gain`` times as large as usual."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.settle = nn.LayerNorm(WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.up.weight.mul_(gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.settle(torch.relu(self.up(self.norm(x)))))


class TwoBranches(nn.Module):
    def __init__(self, left: float = 1.0, right: float = 1.0) -> None:
        super().__init__()
        self.left = Branch(left)
        self.right = Branch(right)
        self.head = nn.Linear(2 * WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.left(x), self.right(x)], dim=-1))


class Jump(nn.Module):
    """Every element becomes plus or minus 400,000."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sign(self.inner(x)) * 4e5


class ResidualStream(nn.Module):
    """Block 1 overflows; the residual stream stays far out of range in every block after it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Branch(1.0), Jump(), Branch(1.0), Branch(1.0)])
        with torch.no_grad():
            for block in self.blocks[2:]:
                block.down.weight.mul_(3e3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class MaskedAttention(nn.Module):
    """Eager attention with an additive mask of -1e9."""

    def __init__(self, mask_all: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        mask = torch.zeros(8, 8).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -1e9)
        if mask_all:
            mask[0] = -1e9
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2) / 4.0 + self.mask
        return torch.softmax(scores, dim=-1) @ v


class AdditiveMask(nn.Module):
    """A softmax over scores to which (1 - keep) times -1e9 is added, as many models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        bias = (1.0 - keep.to(x.dtype)) * -1e9
        return torch.softmax(self.q(x) + bias, dim=-1)


class SelfAttention(nn.Module):
    """As in many language models: heads are split off, and joined by ``contiguous().view()``."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.join = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (part.view(3, 5, 2, 8).transpose(1, 2) for part in self.split(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.join(y.transpose(1, 2).contiguous().view(3, 5, 16))
