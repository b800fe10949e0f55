"""Rows of all samples in one tensor, split by lengths, as in packed attention."""

from __future__ import annotations

import torch
from torch import nn


class Segments(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gain = gain

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        lengths = (ends[1:] - ends[:-1]).tolist()
        out = []
        for part in torch.split(rows, lengths):
            mixed, _ = self.attention(part[None], part[None], part[None], need_weights=False)
            gram = (mixed[0] * self.gain) @ (part * self.gain).transpose(0, 1)  # OVERFLOW
            out.append(mixed[0] + (gram / self.gain / self.gain).mean(-1, keepdim=True))
        return torch.cat(out)


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Segments(gain).eval()


def planted() -> nn.Module:
    return get_model(400.0)


def batches() -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    return [(torch.randn(9, 8), torch.tensor(ends)) for ends in ([0, 4, 9], [0, 2, 5, 9])]
