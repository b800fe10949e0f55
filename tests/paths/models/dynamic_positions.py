"""Positions, spaces and tables whose length is a value."""

from __future__ import annotations

import torch
from torch import nn


class Positions(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        many = lengths.max()
        grid = torch.arange(many, dtype=x.dtype)
        space = torch.linspace(0.1, 1, int(many), dtype=x.dtype)
        table = torch.outer(grid + 1, space).repeat(1, 2)[:, :8]
        far = (table * self.gain).cumprod(0)  # OVERFLOW
        scale = far[lengths - 1].mean(-1, keepdim=True).log1p()
        return self.linear(x[:, :many].mean(1)) * scale


def get_model(gain: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return Positions(gain).eval()


def planted() -> nn.Module:
    return get_model(30.0)


def example_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return torch.randn(2, 7, 8), torch.tensor([5, 3])
