"""Inputs that try to leave their bounds: corners, nearly constant rows, spikes, signs, random values."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch

from tests.support.soundness.program import Input

KINDS = 10


def hostile(item: Input, number: int, seed: int) -> torch.Tensor:
    """Values for an input: in early rounds all inputs get the same kind, later each its own."""
    own = zlib.crc32(f"{item.name} {item.shape} {number} {seed}".encode())
    kind = number if number < 3 else own % KINDS
    return values(item.shape, item.low, item.high, kind, own)


def extreme_values(shape: tuple[int, ...], low: float, high: float, seed: int) -> Iterator[torch.Tensor]:
    """One tensor of each kind, in float32."""
    for kind in range(KINDS):
        yield values(shape, low, high, kind, seed).clamp(low, high).float()


def values(shape: tuple[int, ...], low: float, high: float, kind: int, seed: int) -> torch.Tensor:
    """Values of one kind, within the ends."""
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(shape, generator=generator, dtype=torch.float64)
    ends = torch.tensor([low, high], dtype=torch.float64)
    spread = chance * (ends[1] - ends[0]) + ends[0]
    match kind:
        case 0:
            return spread
        case 1:
            return ends[1].expand(shape).clone()
        case 2:
            return torch.where(chance < 0.5, ends[0], ends[1])
        case 3:
            return ends[0].expand(shape).clone()
        case 4:  # a row that is all but constant
            nearly = ends[1].expand(shape).clone()
            nearly.view(*shape, *([1] * (not shape)))[..., :1] -= (ends[1] - ends[0]) * 1e-6
            return nearly
        case 5:  # one spike per row
            spike = torch.zeros(shape, dtype=torch.float64).clamp(low, high)
            spike.view(*shape, *([1] * (not shape)))[..., -1:] = ends[1]
            return spike
        case 6:  # near zero
            return (chance - 0.5) * 2e-6 * max(abs(low), abs(high))
        case 7:
            return torch.zeros(shape, dtype=torch.float64).clamp(low, high)
        case 8:  # one row at one end, the others at the other
            split = ends[0].expand(shape).clone()
            split.view(*shape, *([1] * (not shape)))[:1] = ends[1]
            return split
        case _:  # whole numbers, where a mean or a difference is exact
            return spread.round()
