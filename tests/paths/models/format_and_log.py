"""Values in text: an f-string chooses a branch, and a log of floats is kept."""

from __future__ import annotations

import torch
from torch import nn


class Logged(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.linear(x)
        text = f"{states.mean().item():.1f}"
        if text.startswith("-"):
            states = -states
        norm = torch.linalg.vector_norm(states * self.gain, ord=1)  # OVERFLOW
        return states * (norm / self.gain / float(text.strip("-") + "1"))


def get_model(gain: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return Logged(gain).eval()


def planted() -> nn.Module:
    return get_model(30000.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 8)
