"""What rounding a stored tensor to a 16-bit format would do to it, by exact count."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ampaudit.formats import NumberFormat

__all__ = ["Survey", "surveyed"]


@dataclass(frozen=True, slots=True)
class Survey:
    """One tensor against a format.

    Attributes:
        peak: largest finite magnitude.
        overflow: finite values that would become infinite.
        broken: values that are NaN or infinite already.
    """

    peak: float
    overflow: int
    broken: int


def surveyed(pieces: Iterable[torch.Tensor], form: NumberFormat) -> Survey:
    """One pass over a tensor's pieces; they are counted only where the extremes say that there is need."""
    peak, overflow, broken = 0.0, 0, 0
    for piece in pieces:
        low, high = torch.aminmax(piece)
        largest = max(-float(low), float(high))
        if not math.isfinite(largest):
            finite = piece.isfinite()
            broken += piece.numel() - int(finite.sum())
            piece = piece[finite]
            largest = float(piece.abs().amax()) if piece.numel() else 0.0
        if largest >= form.overflow_at:
            overflow += int((piece.double().abs() >= form.overflow_at).sum())
        peak = max(peak, largest)
    return Survey(peak, overflow, broken)
