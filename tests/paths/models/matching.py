"""A loss of a detector: predictions are matched to targets by the Hungarian method."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import nn


class Matched(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.boxes = nn.Linear(8, 4)
        self.gain = gain

    def forward(self, queries: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        boxes = self.boxes(queries)
        cost = torch.cdist(boxes, targets, p=1)
        rows, columns = linear_sum_assignment(cost.tolist())
        rows, columns = torch.as_tensor(rows), torch.as_tensor(columns)
        apart = (boxes[rows] - targets[columns]) * self.gain
        loss = apart.pow(2).sum()  # OVERFLOW
        return loss / self.gain / self.gain


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Matched(gain).eval()


def planted() -> nn.Module:
    return get_model(200.0)


def example_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return torch.randn(6, 8), torch.rand(3, 4)
