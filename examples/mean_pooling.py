"""Averages token features: the sum before the division grows with the length, and leaves float16."""

import torch
from torch import nn


class MeanPooling(nn.Module):
    """Embeds tokens, and averages them as sentence encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        nn.init.constant_(self.embed.weight, 0.25)
        nn.init.zeros_(self.embed.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x).sum(1) / x.shape[1]


def get_model() -> nn.Module:
    return MeanPooling()


def example_inputs(length: int = 64) -> torch.Tensor:
    return torch.ones(2, length, 8)
