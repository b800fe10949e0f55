"""Pairs of points by Python on nested lists, the nearest first."""

from __future__ import annotations

import torch
from torch import nn


class Pairs(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        left, right = self.embed(x), self.embed(y)
        cost = torch.cdist(left, right).tolist()
        order = sorted((value, i, j) for i, row in enumerate(cost) for j, value in enumerate(row))
        pairs: dict[int, int] = {}
        for _, i, j in order:
            if i not in pairs and j not in pairs.values():
                pairs[i] = j
        rows = list(pairs)
        product = (left[rows] * self.gain) * (right[list(pairs.values())] * self.gain)  # OVERFLOW
        return (product / self.gain / self.gain).sum(-1)


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Pairs(gain).eval()


def planted() -> nn.Module:
    return get_model(600.0)


def example_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return torch.randn(4, 8), torch.randn(4, 8)
