"""A mixture that gathers the rows of each expert by index, as Mixtral and Switch did."""

from __future__ import annotations

import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.up = nn.ModuleList(nn.Linear(8, 16) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(16, 8) for _ in range(4))
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, 8)
        weights, chosen = self.router(rows).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(rows)
        mask = nn.functional.one_hot(chosen, 4).permute(2, 1, 0)
        for expert in (mask.sum(dim=(-1, -2)) > 0).nonzero():
            index = int(expert)
            rank, row = torch.where(mask[index])
            inner = self.up[index](rows[row])
            if index % 2:
                inner = inner.relu() * self.gain
                inner = inner.square() / self.gain / self.gain  # OVERFLOW
            else:
                inner = torch.nn.functional.silu(inner)
            out.index_add_(0, row, self.down[index](inner) * weights[row, rank, None])
        return out.reshape(x.shape)


def get_model(gain: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    return Experts(gain).eval()


def planted() -> nn.Module:
    return get_model(400.0)


def example_inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 5, 8)


def batches() -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(2, 5, 8), torch.randn(1, 8).expand(2, 5, 8).clone()]
