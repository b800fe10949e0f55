"""Layers that are left out by chance, and a branch on what they made."""

from __future__ import annotations

import torch
from torch import nn


class Dropped(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand(1) < 0.3:
                continue
            x = x + layer(x).tanh()
            if x.abs().max() > 2:
                x = x * self.gain * self.gain  # OVERFLOW
                x = x / self.gain / self.gain / 2
        return x


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Dropped(gain).eval()


def planted() -> nn.Module:
    return get_model(300.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 8)
