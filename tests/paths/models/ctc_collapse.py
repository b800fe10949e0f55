"""CTC: repeated labels collapse in Python lists, and their frames are averaged."""

from __future__ import annotations

import torch
from torch import nn


class Collapse(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.frames = nn.Conv1d(4, 8, 3, padding=1)
        self.labels = nn.Linear(8, 5)
        self.gain = gain

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        states = self.frames(sound)[0].transpose(0, 1)
        best = self.labels(2 * states).argmax(-1).tolist()
        groups: list[list[int]] = []
        for place, label in enumerate(best):
            if groups and best[groups[-1][-1]] == label:
                groups[-1].append(place)
            elif label != 0:
                groups.append([place])
        powers = [(states[group] * self.gain).square().sum(0) for group in groups]  # OVERFLOW
        return torch.stack(powers) / self.gain / self.gain


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Collapse(gain).eval()


def planted() -> nn.Module:
    return get_model(600.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(1, 4, 12)
