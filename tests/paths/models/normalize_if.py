"""Inputs beyond one are divided by their maximum; others are not."""

from __future__ import annotations

import torch
from torch import nn


class Gate(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.abs().max() > 1:
            large = x * self.gain * self.gain  # OVERFLOW
            x = large / self.gain / self.gain / x.abs().max()
        else:
            small = (x + self.gain) * self.gain * self.gain  # OVERFLOW
            x = small / self.gain / self.gain - self.gain
        return self.linear(x)


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Gate(gain).eval()


def planted() -> nn.Module:
    return get_model(300.0)


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 8), torch.rand(4, 8) / 2]
