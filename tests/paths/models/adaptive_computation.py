"""Adaptive computation time: a cell runs until its halting probabilities add up to one."""

from __future__ import annotations

import torch
from torch import nn


class Ponder(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.halt = nn.Linear(8, 1)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state, total = torch.zeros_like(x), torch.zeros(x.shape[0], 1, dtype=x.dtype)
        out = torch.zeros_like(x)
        for _ in range(10):
            state = self.cell(x, state)
            halting = torch.sigmoid(self.halt(state) - 1)
            more = (total < 1).to(x.dtype)
            scaled = self.gain * state * self.gain  # OVERFLOW
            out = out + more * halting * (scaled / self.gain / self.gain)
            total = total + more * halting
            if bool((total >= 1).all()):
                break
        return out


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Ponder(gain).eval()


def planted() -> nn.Module:
    return get_model(600.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(3, 8)
