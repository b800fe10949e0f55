"""Compares the outputs of the 16-bit run with those of FP32.

SQNR relates an error to whole values: a series around 50,000 that rounds to a single value keeps a high SQNR
but no information. So the variation within rows is compared as well, with the mean of each row removed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ampaudit.core.text import ratio_db, share_db
from ampaudit.run.measure import FIELDS, flat_pair, measure_cpu, measure_on_device
from ampaudit.trace.values import components, widened_tensor

MIN_ELEMENTS = 16  # fewer numbers have no distribution to speak of
FLAT = 2.0**-16  # relative to the mean; smaller variation is amplified rounding of FP32 itself
NUMBERS = 7  # per way to divide a tensor into rows: see `measure_rows`
OutputKind = Literal["float", "complex", "integer"]
_SHORT_INTEGERS = (torch.uint8, torch.int8, torch.uint16, torch.int16)
_MEASURED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class RowVariation:
    """The variation of an output within its rows, against its error; constant rows do not count."""

    axes: tuple[int, ...]  # axes along which a row extends; all of them for the whole output
    spread_sq: float  # sum of (reference - mean of the row)^2
    err_sq: float  # sum of (value - reference)^2 over the same rows
    elements: int  # number of elements in these rows
    worst: tuple[int, ...]  # index of the row with the lowest ratio, along the other axes
    mean: float  # mean of that row
    worst_spread_sq: float  # contribution of that row to ``spread_sq``
    worst_err_sq: float  # contribution of that row to ``err_sq``

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
        """10 log10(spread_sq / err_sq) of the worst row."""
        return ratio_db(self.worst_spread_sq, self.worst_err_sq)


def divisions(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the axes of a row for each division of a tensor: the whole, its last axis, its channels."""
    axes = tuple(range(len(shape)))
    row_axes = [axes]
    if len(axes) > 1:
        row_axes.append(axes[-1:])
    if len(axes) > 2:
        row_axes.append(axes[2:] if len(axes) > 3 else axes[1:2])
    sizes = {row: math.prod(shape[axis] for axis in row) for row in row_axes}
    yield from (row for row, size in sizes.items() if size >= MIN_ELEMENTS)


def measure_rows(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the statistics of all divisions as one float64 vector on the tensors' device.

    Each division has ``NUMBERS``: the sums of squared spread and error over all rows that vary, the elements
    of these rows, and the index, mean, spread and error of the worst row. Non-finite pairs are left out.
    """
    finite = reference.isfinite() & value.isfinite()
    wide = torch.where(finite, reference, 0).double()
    errors = torch.where(finite, value.double() - wide, 0).square()
    numbers = []
    for axes in divisions(reference.shape):
        count = finite.sum(axes, keepdim=True)
        mean = wide.sum(axes, keepdim=True) / count.clamp(min=1)
        spread = torch.where(finite, wide - mean, 0).square().sum(axes).flatten()
        error, mean, count = errors.sum(axes).flatten(), mean.flatten(), count.flatten()
        varies = spread > count * (FLAT * mean).square()
        ratio = torch.where(varies & (error > 0), spread / error, torch.inf)
        worst = ratio.argmin()
        sums = [torch.where(varies, part, 0).sum().double() for part in (spread, error, count)]
        numbers += [*sums, worst.double(), mean[worst], spread[worst], error[worst]]
    return torch.stack(numbers) if numbers else torch.zeros(0, dtype=torch.float64, device=reference.device)


def row_variation(shape: Sequence[int], numbers: Sequence[float]) -> RowVariation | None:
    """Return the division with the lowest ratio; ``None`` if no row varies or there is no error."""
    variations = []
    for start, axes in enumerate(divisions(shape)):
        spread, error, elements, worst, *of_worst = numbers[start * NUMBERS : (start + 1) * NUMBERS]
        if spread and error:
            others = [size for axis, size in enumerate(shape) if axis not in axes]
            where = tuple(map(int, np.unravel_index(int(worst), others)))
            variations.append(RowVariation(axes, spread, error, int(elements), where, *of_worst))
    return min(variations, key=lambda rows: rows.db, default=None)


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """One output of one batch compared with FP32."""

    # kind of its elements; booleans count as integers, a complex number as two floats, and integers of 8 and
    # 16 bits as floats, since in images and sound they are quantities and not choices
    kind: OutputKind
    batch: int = 0  # number of the batch
    elements: int = 0  # number of elements compared
    err_sq: float = 0.0  # sum of (value - reference)^2 over finite pairs
    ref_sq: float = 0.0  # sum of reference^2 over the same pairs
    # variation within its rows; ``None`` if no row varies or there is no error
    rows: RowVariation | None = None
    bad: int = 0  # number of elements that are inf or NaN in 16 bits only
    differing: int = 0  # number of integers that differ
    constant: float | None = None  # FP32's value if all elements, two or more, are equal
    mismatch: str = ""  # why the outputs cannot be compared (shape or dtype); empty if they can

    @property
    def accuracy_db(self) -> float | None:
        """The signal-to-noise ratio in dB; ``None`` if exact, -inf if broken.

        10 log10(sum ref^2 / sum err^2) for floats; for integers see ``share_db``.
        """
        if self.mismatch or self.bad:
            return -math.inf
        if self.kind == "integer":
            return share_db(self.differing / self.elements) if self.elements else None
        return None if self.err_sq == 0.0 else ratio_db(self.ref_sq, self.err_sq)

    @property
    def variation_db(self) -> float | None:
        """The same ratio with the mean of each row removed; ``None`` if that is meaningless."""
        return self.rows.db if self.rows is not None else None

    @property
    def energy(self) -> float:
        """The total error as a sum over elements, comparable between runs of a batch."""
        if self.mismatch or self.bad:
            return math.inf
        return float(self.differing) if self.kind == "integer" else self.err_sq


def compare_outputs(pairs: Mapping[str, tuple[Any, Any]], batch: int) -> dict[str, OutputComparison]:
    """Compare pairs of FP32 and 16-bit outputs; all statistics are fetched in one transfer."""
    comparisons: dict[str, OutputComparison] = {}
    waiting: dict[str, tuple[OutputKind, torch.Size, torch.Tensor]] = {}
    for name, (reference, value) in pairs.items():
        tensor = value if reference is None else reference
        kind = "float" if tensor.dtype in _SHORT_INTEGERS else output_kind(tensor)
        mismatch = _mismatch(reference, value)
        if mismatch or not reference.numel():
            comparisons[name] = OutputComparison(kind, batch, 0, mismatch=mismatch)
            continue
        if kind == "complex":
            reference, value = (components(widened_tensor(side)) for side in (reference, value))
        numbers = _differing(reference, value) if kind == "integer" else _float_numbers(reference, value)
        waiting[name] = (kind, reference.shape, numbers)
    rows = [numbers for _, _, numbers in waiting.values()]
    fetched = torch.cat([row.cpu() for row in rows]).split([row.numel() for row in rows]) if rows else ()
    for (name, (kind, shape, _)), row in zip(waiting.items(), fetched, strict=True):
        comparisons[name] = _comparison(kind, batch, shape, row.tolist())
    return {name: comparisons[name] for name in pairs}


def merge_outputs(into: dict[str, OutputComparison], batch: Mapping[str, OutputComparison]) -> list[str]:
    """Keep the worst batch of each output; return the names of the outputs that this batch replaced."""
    worse = [n for n, comparison in batch.items() if n not in into or _rank(comparison) < _rank(into[n])]
    into.update({name: batch[name] for name in worse})
    return worse


def _rank(comparison: OutputComparison) -> tuple[float, float]:
    accuracy, variation = comparison.accuracy_db, comparison.variation_db
    return (math.inf if accuracy is None else accuracy, math.inf if variation is None else variation)


def output_kind(value: torch.Tensor) -> OutputKind:
    """Return the kind of an output's elements."""
    if value.is_complex():
        return "complex"
    return "float" if value.is_floating_point() else "integer"


def _mismatch(reference: Any, value: Any) -> str:
    if reference is None:
        return "no counterpart in FP32"
    if tuple(reference.shape) != tuple(value.shape):
        return f"shape {tuple(value.shape)}, in FP32 {tuple(reference.shape)}"
    if output_kind(reference) != output_kind(value):
        return f"dtype {value.dtype}, in FP32 {reference.dtype}".replace("torch.", "")
    return ""


def _differing(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    reference, value = reference.to(torch.int64), value.to(torch.int64)
    low, high = reference.min().double(), reference.max().double()
    count = (reference != value).sum().double()
    zero = torch.zeros_like(count)
    return torch.stack([count, zero, zero, low, high])


def _float_numbers(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return bad elements, error, signal, minimum, maximum, and the numbers of the rows."""
    if reference.dtype not in _MEASURED:  # float8 has hardly any kernel
        reference, value = reference.float(), value.float()
    value = reference if reference is value else value.to(reference.dtype)
    first, second = flat_pair(reference, value)
    if reference.device.type == "cpu":
        row = torch.tensor(measure_cpu(first, second), dtype=torch.float64)
    else:
        row = measure_on_device(first, second)
    fields = dict(zip(FIELDS, row, strict=True))
    bad = fields["pos_inf"] + fields["neg_inf"] + fields["nan"]
    extremes = first.amin().double(), first.amax().double()
    numbers = torch.stack([bad, fields["err_sq"], fields["ref_sq"], *extremes])
    return torch.cat([numbers, measure_rows(reference, value)])


def _comparison(kind: OutputKind, batch: int, shape: torch.Size, row: list[float]) -> OutputComparison:
    bad, error, signal, low, high, *of_rows = row
    elements = shape.numel() // (2 if kind == "complex" else 1)
    constant = low + 0.0 if low == high and elements > 1 else None
    if kind == "integer":
        return OutputComparison(kind, batch, elements, differing=int(bad), constant=constant)
    rows = row_variation(shape, of_rows)
    return OutputComparison(kind, batch, elements, error, signal, rows, int(bad), constant=constant)
