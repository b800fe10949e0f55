"""Only as many tokens as the batch has room for pass a block."""

from __future__ import annotations

import torch
from torch import nn


class Depths(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.router = nn.Linear(8, 1)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.gain = gain

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        capacity = max(1, int(mask.sum(-1).float().mean().item() * 0.5))
        scores = self.router(x).squeeze(-1).masked_fill(~mask, -100.0)
        index = scores.topk(capacity, dim=-1).indices
        index = index.sort(-1).values[..., None].expand(-1, -1, 8)
        chosen = self.block(x.gather(1, index))
        heavy = torch.cumsum(chosen.abs() * self.gain, dim=1)  # OVERFLOW
        return x.scatter(1, index, chosen + heavy / self.gain)


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Depths(gain).eval()


def planted() -> nn.Module:
    return get_model(40000.0)


def example_inputs() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 6:] = False
    return torch.randn(2, 8, 8), mask
