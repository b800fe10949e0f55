"""A factorization that falls back to another matrix if it is not positive definite."""

from __future__ import annotations

import torch
from torch import nn


class Whiten(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.linear(x)
        try:
            lead = self.checked(states)
        except ValueError:
            lead = states.abs() + 1
        ratio = (lead * self.gain).prod(-1)  # OVERFLOW
        return ratio / self.gain**4

    def checked(self, states: torch.Tensor) -> torch.Tensor:
        if (states <= 0).any():
            raise ValueError("not positive")
        return states


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Whiten(gain).eval()


def planted() -> nn.Module:
    return get_model(30.0)


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, 4), torch.tensor([[0.5, -1.5, 1.5, 0.7]])]
