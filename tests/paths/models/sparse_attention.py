"""Attention over the pairs that a mask leaves, by nonzero."""

from __future__ import annotations

import torch
from torch import nn


class Sparse(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.gain = gain

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        rows, columns = mask.nonzero(as_tuple=True)
        scores = (query[rows] * key[columns]).sum(-1) * self.gain
        weights = scores.exp()  # OVERFLOW
        weights = (weights + 1).log() + 8
        taken = torch.bincount(rows, minlength=len(x)).tolist()
        parts = zip(weights.split(taken), value[columns].split(taken), strict=True)
        return torch.stack([(weight @ values) / weight.sum() for weight, values in parts])


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Sparse(gain).eval()


def planted() -> nn.Module:
    return get_model(20.0)


def example_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return torch.randn(6, 8), (torch.rand(6, 6) > 0.6) | torch.eye(6, dtype=torch.bool)
