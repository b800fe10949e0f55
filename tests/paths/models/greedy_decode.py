"""A recurrent decoder that goes on until its end token."""

from __future__ import annotations

import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.cell = nn.LSTMCell(8, 8)
        self.head = nn.Linear(8, 12)
        self.gain = gain

    def forward(self, memory: torch.Tensor) -> torch.Tensor:
        state = memory, torch.zeros_like(memory)
        token, steps = torch.zeros(1, dtype=torch.long), []
        while len(steps) < 12:
            state = self.cell(self.embedding(token), state)
            scores = self.head(3 * state[0])
            token = scores.argmax(-1)
            weight = torch.exp(self.gain * scores) / 8  # OVERFLOW
            steps.append((weight + 0.01).log())
            if token.item() == 5:
                break
        return torch.stack(steps)


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Decoder(gain).eval()


def planted() -> nn.Module:
    return get_model(15.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(1, 8)


def batches() -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(1, 8) for _ in range(3)]
