"""Statistics of the tokens that a mask leaves."""

from __future__ import annotations

import torch
from torch import nn


class Selected(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        states = self.linear(x)
        left = states.masked_select(mask)
        if left.numel() < 3:
            return states.mean(-1)
        spread = (left * self.gain - left.mean()).square().mean()  # OVERFLOW
        return states.mean(-1) / (spread / self.gain / self.gain).sqrt()


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Selected(gain).eval()


def planted() -> nn.Module:
    return get_model(900.0)


def example_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return torch.randn(4, 8), torch.rand(4, 8) > 0.4
