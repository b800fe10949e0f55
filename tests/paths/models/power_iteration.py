"""The largest eigenvalue, until two estimates agree."""

from __future__ import annotations

import torch
from torch import nn


class Spectral(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self.linear.weight @ self.linear.weight.t()
        vector, before = x.mean(0), -1.0
        for _ in range(40):
            vector = matrix @ vector
            size = float(vector.norm())
            vector = vector / size
            if abs(size - before) < 0.01:
                break
            before = size
        wide = (x @ vector) * self.gain
        return wide * wide / self.gain / self.gain / size  # OVERFLOW


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Spectral(gain).eval()


def planted() -> nn.Module:
    return get_model(900.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return 1 + torch.randn(4, 6)
