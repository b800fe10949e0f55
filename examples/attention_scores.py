"""A decoder whose eager attention scores leave the float16 range in one layer.

The scores are scaled after the product: q @ k first, / sqrt(d) then. With large queries and keys the
product passes 65504 although the scaled score would not.

Expect: one origin, the first matmul of `blocks.1.attention`.
"""

from __future__ import annotations

import math

import torch
from torch import nn

WIDTH, HEADS, LENGTH = 64, 4, 24


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / math.sqrt(WIDTH // HEADS)
        scores = scores.masked_fill(self.mask, torch.finfo(scores.dtype).min)
        mixed = torch.matmul(torch.softmax(scores, dim=-1), v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(self.norm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def get_model() -> nn.Module:
    model = Decoder()
    with torch.no_grad():
        model.blocks[1].attention.qkv.weight[: 2 * WIDTH].mul_(250.0)
    return model


def example_inputs() -> torch.Tensor:
    return torch.randint(0, 100, (2, LENGTH))
