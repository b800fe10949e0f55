"""k-means inside a model: until no point moves to another center."""

from __future__ import annotations

import torch
from torch import nn


class Cluster(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        points = self.embed(x)
        centers, before = points[:3].clone(), None
        for _ in range(10):
            distance = torch.cdist(points, centers)
            nearest = distance.argmin(-1)
            if before is not None and torch.equal(nearest, before):
                break
            before = nearest
            for index in range(3):
                mine = points[nearest == index]
                if len(mine) > 0:
                    centers[index] = mine.mean(0)
        within = (points - centers[nearest]) * self.gain
        inertia = within.pow(2).sum()  # OVERFLOW
        return centers + inertia / self.gain / self.gain


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Cluster(gain).eval()


def planted() -> nn.Module:
    return get_model(200.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(12, 6)
