"""Outliers are found by nonzero and written in place."""

from __future__ import annotations

import torch
from torch import nn


class Outliers(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.linear(x)
        for row, column in (states.abs() > 0.9).nonzero():
            states[row, column] = states[row, column].sign() * 0.9
        wide = states * self.gain
        for row, column in (states.abs() > 0.7).nonzero().tolist():
            wide[row, column] *= self.gain  # OVERFLOW
            wide[row, column] /= self.gain
        return wide / self.gain


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Outliers(gain).eval()


def planted() -> nn.Module:
    return get_model(500.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 8)
