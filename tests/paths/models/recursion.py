"""A sequence is halved until its parts are smooth."""

from __future__ import annotations

import torch
from torch import nn


class Pyramid(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.merge = nn.Linear(8, 4)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.summary(x)

    def summary(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1 or x.std() < 0.8:
            power = (x * self.gain).square().sum(0)  # OVERFLOW
            return (power / self.gain / self.gain).sqrt()
        half = len(x) // 2
        return self.merge(torch.cat([self.summary(x[:half]), self.summary(x[half:])]))


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Pyramid(gain).eval()


def planted() -> nn.Module:
    return get_model(500.0)


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(8, 4), torch.randn(8, 4) * torch.linspace(0.1, 2, 8)[:, None]]
