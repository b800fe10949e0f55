"""Peaks of a signal by torch.where, and windows around them."""

from __future__ import annotations

import torch
from torch import nn


class Peaks(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.filter = nn.Conv1d(1, 1, 5, padding=2)
        self.head = nn.Linear(5, 3)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        signal = self.filter(x)[0, 0]
        inner = signal[1:-1]
        peaks = torch.where((inner > signal[:-2]) & (inner > signal[2:]))[0] + 1
        padded = nn.functional.pad(signal, (2, 2))
        windows = [padded[int(peak) : int(peak) + 5] for peak in peaks]
        energy = torch.stack(windows).mul(self.gain).square()  # OVERFLOW
        return self.head(energy / self.gain / self.gain)


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Peaks(gain).eval()


def planted() -> nn.Module:
    return get_model(500.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(1, 1, 24)
