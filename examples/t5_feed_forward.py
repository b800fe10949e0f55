"""A T5-type encoder whose feed-forward output leaves the float16 range.

The commonest real overflow (transformers issue 5651): the down projection `wo` sums thousands of products
into values beyond 65504, the residual add carries them on, and the NaN is only seen at a later norm.

Expect: the `wo` projections of blocks 1 and 2 are the two origins; block 0 is healthy.
"""

from __future__ import annotations

import torch
from torch import nn

WIDTH, HIDDEN = 64, 256


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6)).to(self.weight.dtype)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm()
        self.wi = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.wo = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.wi(self.norm(x)))
        return x + self.wo(hidden)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList(FeedForward() for _ in range(3))
        self.norm = RMSNorm()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def get_model() -> nn.Module:
    model = Encoder()
    with torch.no_grad():
        for block in (model.blocks[1], model.blocks[2]):
            block.wi.weight.mul_(300.0)
            block.wo.weight.mul_(1500.0)
    return model


def example_inputs() -> torch.Tensor:
    return torch.randint(0, 100, (4, 32))
