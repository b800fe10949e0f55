"""Word counts: the distinct ids, and how often each occurs."""

from __future__ import annotations

import torch
from torch import nn


class Counts(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.gain = gain

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        pooled = []
        for row in ids:
            words, counts = row.unique(return_counts=True)
            if counts.max() == 1:
                pooled.append(self.embedding(words).mean(0))
                continue
            weight = counts.to(self.embedding.weight.dtype) * self.gain
            vector = self.embedding(words) * weight[:, None] * self.gain  # OVERFLOW
            pooled.append((vector / self.gain / self.gain).sum(0) / counts.max().item())
        return torch.stack(pooled)


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Counts(gain).eval()


def planted() -> nn.Module:
    return get_model(300.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 40, (3, 9))
