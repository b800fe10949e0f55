"""Suitable loss scales, as computed by ``run/backward/scale.py``."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LayerScales", "ScaleAdvice", "ScaleRow"]


@dataclass(frozen=True, slots=True)
class LayerScales:
    """The scales that suit one layer, as exponents of two; ``None`` if none does.

    Attributes:
        layer: its path.
        low: smallest exponent at which no more than the stated share is flushed.
        high: largest exponent at which nothing overflows.
        high_at: the gradient that overflows first.
        elements: gradient elements that are not zero in FP32.
        flushed: share of them that is flushed at the run's own scale.
        peak: largest gradient, without the scale.
    """

    layer: str
    low: int
    high: int
    high_at: str
    elements: int
    flushed: float
    peak: float


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """One scale, 2 ** ``exponent``: the flushed share over all layers, and the overflowing gradients."""

    exponent: int
    flushed: float
    overflowing: int


@dataclass(frozen=True, slots=True)
class ScaleAdvice:
    """The suitable loss scales according to one run.

    Attributes:
        share: what may be flushed in a layer.
        layers: in graph order.
        rows: the table over 2^0 to 2^24.
        low: smallest exponent that suits every layer, set by the layer ``low_at``.
        high: largest one, set by ``high_at``.
    """

    share: float
    layers: tuple[LayerScales, ...] = field(repr=False)
    rows: tuple[ScaleRow, ...] = field(repr=False)
    low: int
    high: int
    low_at: str
    high_at: str

    @property
    def exists(self) -> bool:
        """Whether one scale suits all layers."""
        return self.low <= self.high

    @property
    def suggested(self) -> int | None:
        """The exponent to use: one below the upper end, or the lower end if that is higher."""
        return max(self.low, self.high - 1) if self.exists else None
