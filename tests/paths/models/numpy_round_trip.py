"""Smoothing by numpy between two layers."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn


class Smoothed(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.first(x)
        outside = states.detach().float().numpy().astype(np.float64)
        smooth = np.apply_along_axis(lambda row: np.convolve(row, np.ones(3) / 3, mode="same"), -1, outside)
        states = torch.from_numpy(smooth).to(x.dtype)
        strong = (states * self.gain).square()  # OVERFLOW
        return self.second(strong / self.gain / self.gain)


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Smoothed(gain).eval()


def planted() -> nn.Module:
    return get_model(2000.0)


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 8), torch.randn(4, 8)]
