"""Boolean masks on both sides of an assignment."""

from __future__ import annotations

import torch
from torch import nn


class Masked(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.linear(x)
        positive = states > 0
        out = torch.zeros_like(states)
        if positive.any():
            out[positive] = states[positive] * self.gain * self.gain  # OVERFLOW
            out[positive] /= self.gain
            out[positive] /= self.gain
        out[~positive] -= 1
        return out


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Masked(gain).eval()


def planted() -> nn.Module:
    return get_model(400.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 8)
