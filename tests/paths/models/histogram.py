"""Values in bins of their own range: how many there are decides the width."""

from __future__ import annotations

import torch
from torch import nn


class Histogram(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.table = nn.Parameter(torch.randn(12, 4))
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = self.project(x).flatten().float()
        low, high = values.min().item(), values.max().item()
        bins = max(2, int(high - low) * 2)
        counts = torch.histc(values, bins=bins, min=low, max=high).to(x.dtype)
        power = counts.mul(self.gain).pow(2)  # OVERFLOW
        return (power / self.gain / self.gain / len(values)) @ self.table[:bins]


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Histogram(gain).eval()


def planted() -> nn.Module:
    return get_model(100.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 8)
