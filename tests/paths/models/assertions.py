"""Inputs are checked by assert before they are used."""

from __future__ import annotations

import torch
from torch import nn


class Checked(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.min() >= 0, "probabilities are positive"
        assert not torch.isnan(x).any()
        assert torch.isfinite(x).all()
        assert torch.allclose(x.sum(-1), torch.ones(len(x), dtype=x.dtype), atol=1e-2)
        odds = self.gain / (x * (1 - x))  # OVERFLOW
        return self.linear(odds / self.gain / 40)


def get_model(gain: float = 0.01) -> nn.Module:
    torch.manual_seed(0)
    return Checked(gain).eval()


def planted() -> nn.Module:
    return get_model(20000.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 8).softmax(-1)
