"""A graph network over the distinct nodes of its edges."""

from __future__ import annotations

import torch
from torch import nn


class Graph(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.message = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        self.gain = gain

    def forward(self, edges: torch.Tensor) -> torch.Tensor:
        nodes, position = torch.unique(edges, return_inverse=True)
        states = self.embedding(nodes)
        messages = self.message(states[position[0]]).to(states.dtype) * self.gain
        gathered = torch.zeros_like(states)
        gathered = gathered.index_add(0, position[1], messages * self.gain)  # OVERFLOW
        degrees = torch.bincount(position[1], minlength=len(nodes)).clamp(min=1)
        states = states + gathered / self.gain / self.gain / degrees[:, None]
        return self.head(states)


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Graph(gain).eval()


def planted() -> nn.Module:
    return get_model(400.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 50, (2, 10))


def batches() -> list[torch.Tensor]:
    torch.manual_seed(7)
    return [torch.randint(0, high, (2, 10)) for high in (50, 4)]
