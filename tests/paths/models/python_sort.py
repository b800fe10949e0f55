"""Python's own functions on tensors: sorted, min, max, any, in, and a dict of floats."""

from __future__ import annotations

import torch
from torch import nn


class Sorted(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.score = nn.Linear(8, 1)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.score(x).squeeze(-1)
        order = sorted(range(len(x)), key=lambda index: scores[index])
        named = {round(float(score), 2): row for score, row in zip(scores, x, strict=True)}
        least, most = min(scores), max(scores)
        if any(score > 0.5 for score in scores) and len(named) > 1:
            most = most + 1
        reach = (most - least + self.gain) * self.gain  # OVERFLOW
        if scores[0] in scores[1:]:
            reach = reach + 1
        return x[order] * (reach / self.gain - self.gain) + named[min(named)]


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Sorted(gain).eval()


def planted() -> nn.Module:
    return get_model(300.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 8)
