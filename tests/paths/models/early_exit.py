"""A stack of layers that stops when a classifier is confident."""

from __future__ import annotations

import torch
from torch import nn


class EarlyExit(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x)
            logits = head(2 * x.mean(1))
            confident = logits.softmax(-1).amax(-1)
            if confident.min().item() > 0.55:
                early = torch.cosh(logits * self.gain)  # OVERFLOW
                return torch.log(early)
        late = (logits * self.gain) ** 3 / self.gain  # OVERFLOW
        return late / self.gain


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return EarlyExit(gain).eval()


def planted() -> nn.Module:
    return get_model(60.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 4, 8)


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(1, 4, 8) for _ in range(2)]
