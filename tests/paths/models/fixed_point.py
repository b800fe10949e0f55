"""A deep equilibrium layer: iterated until it changes little."""

from __future__ import annotations

import torch
from torch import nn


class Equilibrium(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 8)
        self.gain = gain
        with torch.no_grad():
            self.inner.weight.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, state = self.outer(x), torch.zeros_like(x)
        for _ in range(30):
            following = torch.tanh(self.inner(state) + given)
            change = (following - state).abs().max()
            state = following
            if change < 0.03:
                break
        energy = (state * self.gain).square().sum(-1, keepdim=True)  # OVERFLOW
        return state + energy / self.gain**2


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Equilibrium(gain).eval()


def planted() -> nn.Module:
    return get_model(200.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 8)
