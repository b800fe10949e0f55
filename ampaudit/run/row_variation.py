"""Measures what is left of the variation of an output: of the whole, and within its rows.

SQNR compares an error with whole values: a series around 50,000 that is rounded to one value has a high SQNR
and no information. The mean of each row is taken out, since an output may hold series of several levels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ampaudit.core.decibels import ratio_db

__all__ = ["NUMBERS", "RowVariation", "measure_rows", "row_variation"]

MIN_ELEMENTS = 16  # fewer numbers have no distribution to speak of
FLAT = 2.0**-16  # relative to the mean: less is the rounding of FP32 itself, as ops before amplify it
NUMBERS = 7  # per way to divide a tensor into rows: see `measure_rows`


@dataclass(frozen=True, slots=True)
class RowVariation:
    """The variation of an output within its rows, against its error; constant rows do not count.

    Attributes:
        axes: those along which a row extends; all of them for the whole output.
        spread_sq: sum of (reference - mean of the row)^2.
        err_sq: sum of (value - reference)^2 over the same rows.
        elements: in these rows.
        worst: index of the row with the lowest ratio, along the other axes.
        mean: of that row.
        worst_spread_sq: its part of ``spread_sq``.
        worst_err_sq: its part of ``err_sq``.
    """

    axes: tuple[int, ...]
    spread_sq: float
    err_sq: float
    elements: int
    worst: tuple[int, ...]
    mean: float
    worst_spread_sq: float
    worst_err_sq: float

    @property
    def index(self) -> tuple[int | None, ...]:
        """The worst row as an index of the tensor; ``None`` for an axis of the row."""
        others = iter(self.worst)
        rank = len(self.axes) + len(self.worst)
        return tuple(None if axis in self.axes else next(others) for axis in range(rank))

    @property
    def db(self) -> float:
        """10 log10(spread_sq / err_sq), over all rows."""
        return ratio_db(self.spread_sq, self.err_sq)

    @property
    def worst_db(self) -> float:
        """The same of the worst row."""
        return ratio_db(self.worst_spread_sq, self.worst_err_sq)


def divisions(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the axes of a row, for each way to divide a tensor: the whole, its last axis, its channels."""
    axes = tuple(range(len(shape)))
    found = [axes]
    if len(axes) > 1:
        found.append(axes[-1:])
    if len(axes) > 2:
        found.append(axes[2:] if len(axes) > 3 else axes[1:2])
    sizes = {row: math.prod(shape[axis] for axis in row) for row in found}
    yield from (row for row, size in sizes.items() if size >= MIN_ELEMENTS)


def measure_rows(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the numbers of each division, one after the other, as float64 on the tensors' device.

    They are the sums of squared spread and error over all rows that vary, the elements of these rows, and
    of the worst row the index, mean, spread and error. Pairs that are not finite are left out.
    """
    finite = reference.isfinite() & value.isfinite()
    wide = torch.where(finite, reference, 0).double()
    errors = torch.where(finite, value.double() - wide, 0).square()
    found = []
    for axes in divisions(reference.shape):
        count = finite.sum(axes, keepdim=True)
        mean = wide.sum(axes, keepdim=True) / count.clamp(min=1)
        spread = torch.where(finite, wide - mean, 0).square().sum(axes).flatten()
        error, mean, count = errors.sum(axes).flatten(), mean.flatten(), count.flatten()
        varies = spread > count * (FLAT * mean).square()
        ratio = torch.where(varies & (error > 0), spread / error, torch.inf)
        worst = ratio.argmin()
        sums = [torch.where(varies, part, 0).sum().double() for part in (spread, error, count)]
        found += [*sums, worst.double(), mean[worst], spread[worst], error[worst]]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64, device=reference.device)


def row_variation(shape: Sequence[int], numbers: Sequence[float]) -> RowVariation | None:
    """Return the division whose rows lose most; ``None`` if nothing varies, or nothing is lost."""
    found = []
    for start, axes in enumerate(divisions(shape)):
        spread, error, elements, worst, *of_worst = numbers[start * NUMBERS : (start + 1) * NUMBERS]
        if spread and error:
            others = [size for axis, size in enumerate(shape) if axis not in axes]
            where = tuple(map(int, np.unravel_index(int(worst), others)))
            found.append(RowVariation(axes, spread, error, int(elements), where, *of_worst))
    return min(found, key=lambda rows: rows.db, default=None)
