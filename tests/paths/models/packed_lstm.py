"""Packed sequences: an LSTM over the true lengths, then padded again."""

from __future__ import annotations

import torch
from torch import nn


class Packed(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 4)
        self.gain = gain

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, _ = self.lstm(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(states, batch_first=True)
        sharp = (padded * self.gain).square()  # OVERFLOW
        return self.head(sharp / self.gain / self.gain)


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Packed(gain).eval()


def planted() -> nn.Module:
    return get_model(1000.0)


def example_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return torch.randn(3, 6, 6), torch.tensor([6, 4, 2])


def batches() -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(6)
    return [(torch.randn(3, 6, 6), torch.tensor(lengths)) for lengths in ([6, 4, 2], [3, 3, 5])]
