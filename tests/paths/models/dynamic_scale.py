"""Quantization by a scale that is read from the values."""

from __future__ import annotations

import torch
from torch import nn


class Scaled(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.first(x)
        scale = round(states.abs().max().item(), 1) / 127
        whole = torch.clamp(torch.round(states / scale), -127, 127)
        summed = (whole * self.gain) @ whole.transpose(0, 1)  # OVERFLOW
        return self.second(x) * (summed / self.gain * scale**2).mean(-1, keepdim=True)


def get_model(gain: float = 0.001) -> nn.Module:
    torch.manual_seed(0)
    return Scaled(gain).eval()


def planted() -> nn.Module:
    return get_model(10.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 8)
