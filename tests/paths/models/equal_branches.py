"""What is equal to a table is taken from it; what is close is moved there."""

from __future__ import annotations

import torch
from torch import nn


class Table(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.register_buffer("known", torch.tensor([[0.5, 1.0, -1.0, 2.0], [0.25, 0.0, 1.0, -2.0]]))
        self.linear = nn.Linear(4, 4)
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = []
        for row in x:
            if torch.equal(row, self.known[0]):
                strong = self.linear(row) * self.gain * 30000  # OVERFLOW
                out.append(strong / self.gain / 30000)
            elif torch.allclose(row, self.known[1], atol=0.1):
                out.append((self.known[1] + self.gain).square() / self.gain)  # OVERFLOW
            else:
                out.append(self.linear(row))
        return torch.stack(out)


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Table(gain).eval()


def planted() -> nn.Module:
    return get_model(300.0)


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    other = torch.randn(2, 4)
    equal, close = torch.tensor([[0.5, 1.0, -1.0, 2.0]]), torch.tensor([[0.28, 0.0, 1.0, -2.0]])
    return [torch.cat([other, equal]), torch.cat([close, other])]
