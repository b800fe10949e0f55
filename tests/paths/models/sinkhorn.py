"""Optimal transport: rows and columns are scaled until the plan has its marginals."""

from __future__ import annotations

import torch
from torch import nn


class Transport(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        cost = torch.cdist(self.project(x), self.project(y))
        plan = torch.exp(-cost)
        steps = 0
        while (plan.sum(1) - 1).abs().max() > 0.02 and steps < 20:
            plan = plan / plan.sum(1, keepdim=True)
            plan = plan / plan.sum(0, keepdim=True)
            steps += 1
        total = (plan * self.gain * cost * self.gain).sum()  # OVERFLOW
        return total / self.gain / self.gain


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Transport(gain).eval()


def planted() -> nn.Module:
    return get_model(300.0)


def example_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    return torch.randn(4, 8), torch.randn(4, 8)
