"""A tree of linear models: each sample is routed by Python."""

from __future__ import annotations

import torch
from torch import nn


class Tree(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(8, 1) for _ in range(7))
        self.leaves = nn.ModuleList(nn.Linear(8, 4) for _ in range(8))
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.follow(row, 0) for row in x])

    def follow(self, row: torch.Tensor, node: int) -> torch.Tensor:
        if node >= 7:
            if node % 2:
                strong = self.leaves[node - 7](row) * self.gain
                return strong.square().mean(-1, keepdim=True) / self.gain  # OVERFLOW
            return self.leaves[node - 7](row).mean(-1, keepdim=True)
        return self.follow(row, 2 * node + (1 if self.gates[node](row) > 0 else 2))


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Tree(gain).eval()


def planted() -> nn.Module:
    return get_model(900.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return 2 * torch.randn(4, 8)


def batches() -> list[torch.Tensor]:
    torch.manual_seed(4)
    return [2 * torch.randn(4, 8), 2 * torch.randn(4, 8)]
