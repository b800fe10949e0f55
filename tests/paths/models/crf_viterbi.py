"""A tagger with a CRF: the best path is followed back tag by tag with .item()."""

from __future__ import annotations

import itertools

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.emissions = nn.Linear(8, 5)
        self.transitions = nn.Parameter(torch.randn(5, 5))
        self.gain = gain

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tags, totals = [], []
        for row, length in zip(self.emissions(self.embedding(ids)), mask.sum(-1).tolist(), strict=True):
            best, came_from = row[0], []
            for step in range(1, length):
                best, index = (best[:, None] + self.transitions + row[step]).max(0)
                came_from.append(index)
            last = best.argmax().item()
            path = [last]
            for index in reversed(came_from):
                path.append(index[path[-1]].item())
            path = path[::-1]
            total = row[range(length), path].sum()
            for before, after in itertools.pairwise(path):
                total = total + self.transitions[before, after]
            odds = torch.exp(self.gain * total)  # OVERFLOW
            totals.append(odds.log())
            tags.append(torch.tensor(path + [0] * (ids.shape[1] - length)))
        return torch.stack(tags), torch.stack(totals)


def get_model(gain: float = 0.5) -> nn.Module:
    torch.manual_seed(0)
    return Tagger(gain).eval()


def planted() -> nn.Module:
    return get_model(4.0)


def example_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 4:] = False
    return torch.randint(0, 30, (3, 7)), mask
