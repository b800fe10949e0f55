"""A decoder with a penalty for ids that a Python dict has seen."""

from __future__ import annotations

import torch
from torch import nn


class Penalized(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)
        self.gain = gain

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.embedding(ids).cumsum(0)[-1])
        seen: dict[int, int] = {}
        for token in ids.tolist():
            seen[token] = seen.get(token, 0) + 1
        for token, times in seen.items():
            penalty = (scores[token].abs() + self.gain) ** times  # OVERFLOW
            scores[token] = scores[token] - penalty.log()
        return scores


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Penalized(gain).eval()


def planted() -> nn.Module:
    return get_model(300.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.tensor([3, 5, 3, 7, 3, 1, 5])
