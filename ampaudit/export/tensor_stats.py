"""What rounding a stored tensor to a 16-bit format would do to it, by exact count."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ampaudit.core.formats import NumberFormat

__all__ = ["TensorScan", "TensorStats"]


@dataclass(frozen=True, slots=True)
class TensorStats:
    """One tensor against a format.

    Attributes:
        peak: largest finite magnitude.
        overflow: finite values that would become infinite.
        broken: values that are NaN or infinite already.
    """

    peak: float
    overflow: int
    broken: int


class TensorScan:
    """Measures a tensor piece by piece, on its way elsewhere, while it is in the cache."""

    def __init__(self, form: NumberFormat) -> None:
        self._form = form
        self._peak, self._overflow, self._broken = 0.0, 0, 0

    def add(self, piece: torch.Tensor) -> None:
        """Measure a piece; elements are counted only where its extremes say that there is need."""
        if not piece.numel():
            return
        low, high = torch.aminmax(piece)
        largest = max(-float(low), float(high))
        if not math.isfinite(largest):
            finite = piece[piece.isfinite()]
            self._broken += piece.numel() - finite.numel()
            largest = float(finite.abs().amax()) if finite.numel() else 0.0
        if largest >= self._form.overflow_at:
            magnitudes = piece.double().abs()
            self._overflow += int((magnitudes.isfinite() & (magnitudes >= self._form.overflow_at)).sum())
        self._peak = max(self._peak, largest)

    @property
    def stats(self) -> TensorStats:
        """The statistics of all pieces so far."""
        return TensorStats(self._peak, self._overflow, self._broken)
