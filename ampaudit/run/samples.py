"""Estimates distributions from samples: exponents, flushed and subnormal shares, smallest magnitude.

Peaks and counts of inf and NaN are exact (``measure``). A distribution does not need every element: up
to 512 per site and batch are kept and reduced together, a block of sites at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, PlainSerializer

from ampaudit.run.views import sample

__all__ = ["AS_RUN", "SampleStatistics", "Samples"]


# float32 exponents from -150 (below the smallest subnormal) to 128
EXPONENT_LOW = -150
_BINS = 279
_FLUSH_AT = 128  # rows kept before they are reduced: at most half a MiB


def _run_of(counts: dict[int, int]) -> list[int]:
    """Return the lowest exponent, followed by the counts of all exponents up to the highest."""
    if not counts:
        return []
    low, high = min(counts), max(counts)
    return [low, *(counts.get(exponent, 0) for exponent in range(low, high + 1))]


def _counts_of(value: Any) -> Any:
    """Undo ``_run_of``; anything but a list of integers is left to the type's own validation."""
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        return value
    return {value[0] + place: count for place, count in enumerate(value[1:]) if count}


AS_RUN = (BeforeValidator(_counts_of), PlainSerializer(_run_of, return_type=list[int]))
Bins = Annotated[dict[int, int], *AS_RUN]


@dataclass(slots=True)
class SampleStatistics:
    """Sample statistics of one site, summed over batches; ``exponents`` counts floor(log2|reference|)."""

    sampled: int = 0
    zeros: int = 0
    ref_zeros: int = 0
    flushed: int = 0
    subnormal: int = 0
    min_nonzero: float | None = None
    max_relative: float = 0.0
    max_error: float = 0.0
    exponents: Bins = field(default_factory=dict)

    def add(self, other: SampleStatistics) -> None:
        """Merge another batch's samples into these."""
        for name in ("sampled", "zeros", "ref_zeros", "flushed", "subnormal"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_relative = max(self.max_relative, other.max_relative)
        self.max_error = max(self.max_error, other.max_error)
        least = [x for x in (self.min_nonzero, other.min_nonzero) if x is not None]
        self.min_nonzero = min(least, default=None)
        for exponent, count in other.exponents.items():
            self.exponents[exponent] = self.exponents.get(exponent, 0) + count


@dataclass(slots=True)
class Samples:
    """Collects samples on the device and reduces them in blocks.

    Attributes:
        min_normal: Smallest normal number of the 16-bit format.
    """

    min_normal: float
    results: dict[str, SampleStatistics] = field(default_factory=dict)
    _rows: dict[int, list[tuple[str, torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    _pending: int = 0

    def add(self, site: str, reference: torch.Tensor, value: torch.Tensor) -> None:
        """Keep a sample of a pair of vectors, which may be the same object."""
        row = sample(reference)
        row = row.clone() if row.data_ptr() == reference.data_ptr() else row
        other = row
        if value is not reference:
            other = sample(value)
            other = other.clone() if other.data_ptr() == value.data_ptr() else other
        self._rows.setdefault(row.numel(), []).append((site, row, other))
        self._pending += 1
        if self._pending >= _FLUSH_AT:
            self.flush()

    def flush(self) -> None:
        """Reduce all pending samples, rows of equal length together."""
        for length, rows in self._rows.items():
            if length:
                self._reduce(rows)
        self._rows.clear()
        self._pending = 0

    def _reduce(self, rows: list[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
        reference = torch.stack([row[1] for row in rows]).float()
        value = torch.stack([row[2] for row in rows]).float()
        ref_finite = reference.isfinite()
        finite = ref_finite & value.isfinite()
        error = torch.where(finite, value - reference, 0).abs()
        reference, value = reference.abs(), value.abs()
        nonzero, ref_nonzero = value != 0, reference != 0
        smallest = torch.where(nonzero & finite, value, torch.inf).amin(1)
        relative = torch.where(ref_nonzero, error / reference, 0).amax(1)
        counts = torch.stack(
            [
                (~nonzero).sum(1),
                (~ref_nonzero).sum(1),
                (~nonzero & ref_nonzero).sum(1),
                (nonzero & (value < self.min_normal)).sum(1),
            ]
        )
        histogram = _histogram(reference, ref_finite & ref_nonzero)
        fetched = zip(
            (row[0] for row in rows),
            counts.t().tolist(),
            smallest.tolist(),
            relative.tolist(),
            error.amax(1).tolist(),
            histogram.tolist(),
            strict=True,
        )
        for site, (zeros, ref_zeros, flushed, subnormal), least, worst, widest, bins in fetched:
            exponents = {index + EXPONENT_LOW: count for index, count in enumerate(bins) if count}
            statistics = SampleStatistics(
                sampled=reference.shape[1],
                zeros=zeros,
                ref_zeros=ref_zeros,
                flushed=flushed,
                subnormal=subnormal,
                min_nonzero=None if least == torch.inf else least,
                max_relative=worst,
                max_error=widest,
                exponents=exponents,
            )
            self.results.setdefault(site, SampleStatistics()).add(statistics)


def _histogram(magnitudes: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Count floor(log2 x) of the counted elements in each row; shape (rows, bins)."""
    _, exponent = torch.frexp(torch.where(counted, magnitudes, 1.0))
    bins = (exponent.long() - 1 - EXPONENT_LOW).clamp(0, _BINS - 1)
    rows = torch.zeros(magnitudes.shape[0], _BINS, dtype=torch.int64, device=magnitudes.device)
    return rows.scatter_add_(1, bins, counted.long())
