"""A convolution whose kernel size follows from the values."""

from __future__ import annotations

import torch
from torch import nn


class Blur(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.width = nn.Linear(4, 1)
        self.mix = nn.Conv2d(4, 4, 1)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spread = self.width(x.abs().mean((0, 2, 3))).sigmoid() * 3 + 1
        size = 2 * int(spread.round()) + 1
        grid = torch.arange(size, dtype=x.dtype) - size // 2
        kernel = torch.exp(-(grid**2) / (2 * spread**2))
        kernel = (kernel / kernel.sum()) * self.gain
        kernel = kernel.expand(4, 1, 1, size)
        blurred = nn.functional.conv2d(x * self.gain, kernel, padding=(0, size // 2), groups=4)  # OVERFLOW
        return self.mix(blurred / self.gain / self.gain)


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Blur(gain).eval()


def planted() -> nn.Module:
    return get_model(700.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 4, 8, 8)
