"""A vision transformer that drops the tokens of least attention."""

from __future__ import annotations

import torch
from torch import nn


class Pruned(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.first = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.second = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.score = nn.Linear(8, 1)
        self.gain = gain

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        tokens = self.first(self.patches(image).flatten(2).transpose(1, 2))
        scores = self.score(tokens).squeeze(-1)
        kept = scores[0] > scores[0].mean()
        tokens = tokens[:, kept]
        norms = torch.einsum("bnc,bnc->bn", tokens * self.gain, tokens)  # OVERFLOW
        tokens = tokens * (norms / self.gain).unsqueeze(-1).rsqrt()
        return self.second(tokens).mean(1)


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Pruned(gain).eval()


def planted() -> nn.Module:
    return get_model(20000.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(1, 3, 16, 16)
