"""Newton's method on values, until the square is near."""

from __future__ import annotations

import torch
from torch import nn


class Root(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        target = self.linear(x).abs() + 1
        guess = target
        while not ((guess * guess - target).abs() < 0.05).all():
            guess = (guess + target / guess) / 2
        cube = (guess * self.gain) * (guess * self.gain) * guess  # OVERFLOW
        return cube / self.gain / self.gain


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Root(gain).eval()


def planted() -> nn.Module:
    return get_model(400.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return 3 * torch.randn(4, 8)
