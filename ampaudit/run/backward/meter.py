"""Measures gradients: peaks, inf, NaN, errors, flushed elements, and the counts of all exponents."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from ampaudit.run.backward.record import GradientRecord, GradientStats
from ampaudit.run.measure import BLOCK, FIELDS, measure_cpu, measure_on_device
from ampaudit.run.views import flat_pair

__all__ = ["EXPONENT_OFFSET", "GradientMeter", "counts_on_cpu", "exponent_counts"]

EXPONENT_OFFSET = 127
# Maximum number of roundings of 2^-24 per term of a sum of float32 gradients. Where the sum cancels, as for a
# bias before batch norm or of a key before softmax, the remainder was up to 6 per term in the models of the
# tests; meaningful sums were 2^19 and more.
ROUNDINGS = 32
_BINS = 256


def exponent_counts(magnitudes: torch.Tensor) -> torch.Tensor:
    """Count the elements x of a float32 vector with 2^e < |x| <= 2^(e+1) at index e + 127; shape (256,).

    The bins are open below and closed above, so that "x rounds to zero", x <= 2^k, applies to whole bins.
    Zeros are left out; bin 255 counts inf and NaN. All subnormal numbers of float32 have the smallest
    exponent, -127.
    """
    bits = magnitudes.view(torch.int32) & 0x7FFFFFFF
    places = torch.where(bits == 0, _BINS, ((bits - 1) >> 23).clamp_(min=0))
    places = torch.where(bits > 0x7F7FFFFF, _BINS - 1, places)
    counts = torch.zeros(_BINS + 1, dtype=torch.int64, device=magnitudes.device)
    return counts.scatter_add_(0, places.long(), torch.ones_like(places, dtype=torch.int64))[:_BINS]


def counts_on_cpu(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return ``exponent_counts`` of a finite reference, and how many are zero in ``value``; shape (257,).

    Takes a fraction of the time by working block by block, in scratch memory that stays in the cache.
    """
    total = torch.zeros(_BINS + 1, dtype=torch.int64)
    scratch = torch.empty(min(BLOCK, reference.numel()), dtype=torch.int32)
    both = torch.empty(scratch.shape, dtype=torch.bool)
    bits = reference.view(torch.int32)
    for start in range(0, reference.numel(), BLOCK):
        part = bits[start : start + BLOCK]
        places = torch.bitwise_and(part, 0x7FFFFFFF, out=scratch[: part.numel()])
        places.sub_(1).bitwise_right_shift_(23).add_(1)  # one more than the bin, so that zeros are at 0
        counts = torch.bincount(places, minlength=_BINS)
        total[: _BINS - 1] += counts[1:_BINS]
        if value is not reference:
            pair = reference[start : start + BLOCK], value[start : start + BLOCK]
            nonzero = torch.logical_and(*pair, out=both[: part.numel()])
            total[_BINS] += part.numel() - counts[0] - torch.count_nonzero(nonzero)
    return total


_Measured = tuple[list[float] | torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    parameter: bool
    low_precision: bool
    fields: list[float] | torch.Tensor
    counts: torch.Tensor
    elements: int


class GradientMeter:
    """Measures pairs of gradients. On a GPU, measurements stay on the device until ``finish``.

    Exponents are counted without the loss scale.

    Attributes:
        unpaired: Sites whose gradients differ in size between FP32 and 16 bits, in order.
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale
        mantissa, exponent = math.frexp(scale)
        # bins of the scaled gradient are those of the unscaled one if the scale is a power of two
        self._exponent = exponent - 1 if mantissa == 0.5 else None
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor, _Measured]] = {}
        self._rows: list[_Row] = []
        self._sums: list[tuple[str, bool, str]] = []
        self._cancelled: set[tuple[str, bool]] = set()
        self._wrong: dict[tuple[str, bool], tuple[int, int]] = {}
        self._fetched: list[tuple[_Row, dict[str, float], list[int]]] = []
        self.unpaired: dict[str, None] = {}

    def add(
        self,
        name: str,
        reference: torch.Tensor,
        value: torch.Tensor,
        *,
        parameter: bool,
        low_precision: bool,
        keep: bool = False,
    ) -> None:
        """Measure one gradient; with ``keep``, its results are reused for the parameter behind a cast."""
        if reference.shape != value.shape:
            self.unpaired[name] = None
            return
        if value.numel() == 0:
            return
        if value.dtype != reference.dtype:
            value = value.to(reference.dtype)
        earlier = self._known.get(id(value))
        if earlier is None or earlier[0] is not reference:
            measured = self._measured(*flat_pair(reference, value))
        else:
            measured = earlier[2]
        if keep:
            self._known[id(value)] = reference, value, measured
        self._rows.append(_Row(name, parameter, low_precision, *measured, value.numel()))

    def _measured(self, first: torch.Tensor, second: torch.Tensor) -> _Measured:
        on_cpu = first.device.type == "cpu"
        fields = measure_cpu(first, second) if on_cpu else measure_on_device(first, second)
        if self._exponent is None:
            first, second = first / self._scale, second / self._scale
        if isinstance(fields, list) and first.dtype is torch.float32 and not fields[FIELDS.index("ref_bad")]:
            return fields, counts_on_cpu(first, second)
        flushed = ((second == 0) & (first != 0)).sum()
        return fields, torch.cat([exponent_counts(first.float()), flushed.reshape(1)])

    def sums(self, name: str, parameter: bool, source: str) -> None:
        """Record that a gradient is the sum of a site's gradient, perhaps over rows."""
        self._sums.append((name, parameter, source))

    def wrong(self, name: str, parameter: bool, *, infinite: int, nan: int) -> None:
        """Count elements that are repaired before they are measured."""
        before = self._wrong.get((name, parameter), (0, 0))
        self._wrong[name, parameter] = before[0] + infinite, before[1] + nan

    def finish(self) -> None:
        """Fetch everything from the device at once."""
        waiting = [row.fields for row in self._rows if isinstance(row.fields, torch.Tensor)]
        fetched = iter(torch.stack(waiting).tolist() if waiting else [])
        counts = torch.stack([row.counts for row in self._rows]).tolist() if self._rows else []
        for row, numbers in zip(self._rows, counts, strict=True):
            fields = next(fetched) if isinstance(row.fields, torch.Tensor) else row.fields
            self._fetched.append((row, dict(zip(FIELDS, fields, strict=True)), numbers))
        self._rows.clear()
        self._known.clear()
        self._find_cancelled()

    def _find_cancelled(self) -> None:
        """Find gradients that are sums and in FP32 no larger than the rounding errors of their terms."""
        by_name = {(row.name, row.parameter): (row.elements, fields) for row, fields, _ in self._fetched}
        noise: dict[tuple[str, bool], float] = {}
        for name, parameter, source in self._sums:
            key, source_key = (name, parameter), (source, False)
            if source_key not in by_name or key not in by_name:
                continue
            (elements, terms), (length, fields) = by_name[source_key], by_name[key]
            rows, rms = elements / length, math.sqrt(terms["ref_sq"] / elements)
            least = rows * max(ROUNDINGS * 2.0**-24 * rms, noise.get(source_key, 0.0))
            noise[key] = max(noise.get(key, 0.0), least)
            if fields["ref_peak"] <= noise[key]:
                self._cancelled.add(key)

    @property
    def broken(self) -> bool:
        """Return whether a gradient is inf or NaN in 16 bits only."""
        return any(f["pos_inf"] + f["neg_inf"] + f["nan"] > 0 for _, f, _ in self._fetched)

    @property
    def broken_reference(self) -> list[str]:
        """Return parameters whose FP32 gradient is inf or NaN."""
        return [row.name for row, fields, _ in self._fetched if row.parameter and fields["ref_bad"] > 0]

    def into(self, record: GradientRecord) -> None:
        """Merge the measurements into a record."""
        for row, fields, counts in self._fetched:
            table: dict[Any, GradientStats] = record.parameters if row.parameter else record.sites
            stats = table.setdefault(row.name, GradientStats(row.low_precision))
            self._merge(stats, fields, counts, row.elements)
            infinite, nan = self._wrong.pop((row.name, row.parameter), (0, 0))
            stats.values.pos_inf += infinite
            stats.values.nan += nan
            stats.cancelled |= (row.name, row.parameter) in self._cancelled

    def _merge(
        self, stats: GradientStats, fields: dict[str, float], counts: list[int], elements: int
    ) -> None:
        stats.values.merge(fields, elements)
        *bins, flushed = counts
        stats.flushed += flushed
        stats.nonzero += sum(bins[: _BINS - 1])
        stats.exponents += Counter(
            {place - EXPONENT_OFFSET - (self._exponent or 0): n for place, n in enumerate(bins[:-1]) if n}
        )
        if math.isfinite(fields["ref_peak"]):
            stats.peak = max(stats.peak, fields["ref_peak"] / self._scale)
