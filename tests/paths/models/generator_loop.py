"""Windows come from a Python generator that looks at the values."""

from __future__ import annotations

import torch
from torch import nn


class Windows(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(4)
        for window in self.windows(x):
            logits = self.linear(window.mean(0))
            steep = torch.cosh(logits * self.gain)  # OVERFLOW
            total = total + steep.log()
        return total

    def windows(self, x: torch.Tensor):
        start = 0
        for place in range(1, len(x)):
            if (x[place] * x[place - 1]).sum() < 0:
                yield x[start:place]
                start = place
        yield x[start:]


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Windows(gain).eval()


def planted() -> nn.Module:
    return get_model(40.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(9, 8)
