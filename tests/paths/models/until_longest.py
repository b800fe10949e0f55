"""A recurrence over the longest of the lengths, each row until its own."""

from __future__ import annotations

import torch
from torch import nn


class Recurrent(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 8)
        self.gain = gain

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(len(x), 8)
        for step in range(max(lengths).item()):
            running = (lengths > step)[:, None]
            state = torch.where(running, self.cell(x[:, step], state), state)
        sixth = (state.abs() + self.gain).pow(6)  # OVERFLOW
        return sixth.log() / 6


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Recurrent(gain).eval()


def planted() -> nn.Module:
    return get_model(9.0)


def batches() -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    return [(torch.randn(3, 6, 4), torch.tensor(lengths)) for lengths in ([2, 3, 4], [6, 1, 2])]
