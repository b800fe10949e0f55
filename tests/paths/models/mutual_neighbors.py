"""Edges between mutual nearest neighbors, then attention along them."""

from __future__ import annotations

import torch
from torch import nn


class Neighbors(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.embed(x)
        distance = torch.cdist(states, states).fill_diagonal_(100.0)
        nearest = distance.argmin(-1)
        mutual = nearest[nearest] == torch.arange(len(x))
        edges = torch.stack([mutual.nonzero().squeeze(-1), nearest[mutual]])
        if edges.shape[1] == 0:
            return states
        left, right = states[edges[0]], states[edges[1]]
        force = (left - right).abs().mul(self.gain).pow(3)  # OVERFLOW
        return states.index_add(0, edges[0], (force / self.gain**3).to(states.dtype))


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Neighbors(gain).eval()


def planted() -> nn.Module:
    return get_model(90.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 8)
