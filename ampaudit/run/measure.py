"""Computes exact statistics of a value against its reference as a short vector of numbers.

Three routines fill the same fields. ``measure_any`` works on every device without synchronizing.
``measure_on_device`` does the same in a single kernel where it can, on CUDA with Triton (``fused``).
``measure_cpu`` processes blocks that fit the cache. Finite blocks, nearly all, take a shorter path; other
blocks go to ``measure_any``.

Peaks and counts of inf and NaN are exact (``measure``). A distribution does not need every element: up
to 512 per site and batch are kept and reduced together, a block of sites at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, PlainSerializer

from ampaudit.core.text import signal_to_noise_db
from ampaudit.trace.values import components

SAMPLE_RUNS = 8
SAMPLE_RUN_LENGTH = 64
# float32 exponents from -150 (below the smallest subnormal) to 128
EXPONENT_LOW = -150
_BINS = 279
_FLUSH_AT = 128  # rows kept before they are reduced: at most half a MiB
_MAXIMA = ("ref_peak", "peak", "bad_ref_peak", "inside_peak")
_JOINED_SEPARATELY = ("batch_peaks", "samples")
FIELDS = (
    "ref_peak",  # largest finite |reference|; |value| in blocks whose reference is not read
    "peak",  # largest finite |value|; |reference| if all is finite and far from the limit
    "pos_inf",  # +inf where the reference is finite
    "neg_inf",  # -inf where the reference is finite
    "nan",  # NaN where the reference is not NaN
    "err_sq",  # sum of (value - reference)^2 over pairs of finite elements
    "ref_sq",  # sum of reference^2 over the same pairs; 0 where both are the same tensor
    "bad_ref_peak",  # largest |reference| among the elements that went wrong
    "ref_bad",  # elements of the reference itself that are not finite
)
_MERGE_MAX = tuple(name in _MAXIMA for name in FIELDS)
# 1 MiB of float32: block, its reference and the scratch block stay in a core's cache
BLOCK = 1 << 18
ERROR_EVERY = 8
_FUSED_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def measure_any(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the fields as a float64 vector on the tensors' device, for two float vectors of equal length."""
    zero = torch.zeros((), dtype=torch.float64, device=value.device)
    ref_finite, finite = reference.isfinite(), value.isfinite()
    both = ref_finite & finite
    ref_clean = torch.where(ref_finite, reference, 0).double()
    difference = torch.where(both, value.double() - ref_clean, 0)
    paired = torch.where(both, ref_clean, 0)
    wrong = ref_finite & ~finite
    fields = (
        _peak(ref_clean, zero),
        _peak(torch.where(finite, value, 0).double(), zero),
        (ref_finite & (value == math.inf)).sum().double(),
        (ref_finite & (value == -math.inf)).sum().double(),
        (value.isnan() & ~reference.isnan()).sum().double(),
        difference.square().sum(),
        paired.square().sum(),
        _peak(torch.where(wrong, ref_clean, 0), zero),
        (~ref_finite).sum().double(),
    )
    return torch.stack(fields)


def measure_on_device(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the fields of ``measure_any`` from one kernel if possible; the dtypes may differ."""
    suits = all(vector.is_contiguous() and vector.dtype in _FUSED_DTYPES for vector in (reference, value))
    fused = _fused(value.device) if value.is_cuda and value.numel() and suits else None
    return fused(reference, value) if fused else measure_any(reference, value.to(reference.dtype))


@cache
def _fused(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return the single-kernel routine, unless Triton or its C compiler is missing."""
    one = torch.ones(1, device=device)
    try:
        from ampaudit.run.fused import measure_fused

        measure_fused(one, one)
    except Exception:  # whatever Triton raises, torch's own ops give the same fields
        return None
    return measure_fused


def measure_cpu(
    reference: torch.Tensor, value: torch.Tensor, near: float = math.inf, error_every: int = 1
) -> list[float]:
    """Return the fields as Python numbers, for CPU tensors.

    Peaks and counts of inf and NaN cover every element. Reading all of the reference costs as much as the
    rest, so errors may be summed over only some of the blocks. The errors of a vector of up to 262,144
    elements, a single block, are complete.

    Args:
        reference: A float vector.
        value: A vector of the same length, or the same object.
        near: Reference peak from which the value's own peak is measured as well.
        error_every: Which blocks to sum errors over: the first of each ``error_every``, and those with a
            peak of at least ``near``.
    """
    merged = [0.0] * len(FIELDS)
    same = reference is value
    if same and value.numel() and math.isfinite(peak := _peak_of(value)):
        merged[:2] = peak, peak
        return merged
    for start in range(0, value.numel(), BLOCK * error_every):
        read = [start]
        rest = value[start + BLOCK : start + BLOCK * error_every]
        if rest.numel():
            peak = _peak_of(rest)
            if not peak < near:
                peaks = [_peak_of(block) for block in rest.split(BLOCK)]
                read += [start + BLOCK * i for i, block_peak in enumerate(peaks, 1) if not block_peak < near]
                peak = max((block_peak for block_peak in peaks if block_peak < near), default=0.0)
            merged[:2] = max(merged[0], peak), max(merged[1], peak)
        for at in read:
            v = value[at : at + BLOCK]
            r = v if same else reference[at : at + BLOCK]
            _merge(merged, _measure_block(r, v, same, near))
    return merged


def _measure_block(reference: torch.Tensor, value: torch.Tensor, same: bool, near: float) -> Sequence[float]:
    ref_peak = _peak_of(reference)
    difference = None if same else torch.sub(value, reference)
    err_sq = 0.0 if difference is None else _sum_of_squares(difference)
    # a finite sum of squares has only finite terms, so the value is finite where the reference is
    if not (math.isfinite(ref_peak) and math.isfinite(err_sq)):
        return [float(x) for x in measure_any(reference, value).tolist()]
    peak = ref_peak if same or ref_peak < near else _peak_of(value)
    ref_sq = 0.0 if same else _sum_of_squares(reference)
    return (ref_peak, peak, 0.0, 0.0, 0.0, err_sq, ref_sq, 0.0, 0.0)


def _merge(into: list[float], other: Sequence[float]) -> None:
    for index, takes_max in enumerate(_MERGE_MAX):
        into[index] = max(into[index], other[index]) if takes_max else into[index] + other[index]


def _peak(value: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return value.abs().amax() if value.numel() else zero


def finite_peak(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude of a tensor; 0 for integers."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    return float(tensor.float().abs().nan_to_num(0.0, torch.finfo(torch.float32).max).amax())


def _peak_of(value: torch.Tensor) -> float:
    """Return the largest magnitude; NaN or infinity if there is one."""
    low, high = torch.aminmax(value)  # both are NaN if there is one
    return max(abs(low.item()), abs(high.item()))


def _sum_of_squares(value: torch.Tensor) -> float:
    total = torch.dot(value, value).item()
    # beyond 1e19 a float32 sum of squares overflows, below 1e-19 it vanishes
    if 1e-30 < total < math.inf:
        return total
    wide = value.double()
    return torch.dot(wide, wide).item()


def fetch(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return tensors of one shape as numbers, in one transfer from their device."""
    rows = list(tensors)
    return torch.stack(rows).tolist() if rows else []


def flat_pair(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors as corresponding vectors, without copying those of the same dense layout."""
    if first is second:
        vector = _flat(first) if _dense(first) else first.reshape(-1)
        return vector, vector
    if first.stride() == second.stride() and _dense(first) and _dense(second):
        return _flat(first), _flat(second)
    return first.reshape(-1), second.reshape(-1)


def sample(vector: torch.Tensor) -> torch.Tensor:
    """Return all of a short vector, or 8 evenly spaced runs of 64 elements (a view, so a cheap copy)."""
    total = SAMPLE_RUNS * SAMPLE_RUN_LENGTH
    if vector.numel() <= total:
        return vector
    step = (vector.numel() - SAMPLE_RUN_LENGTH) // (SAMPLE_RUNS - 1)
    stride = vector.stride(0)
    return vector.as_strided(
        (SAMPLE_RUNS, SAMPLE_RUN_LENGTH), (step * stride, stride), vector.storage_offset()
    ).reshape(-1)


def _dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def wrong_elements(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """Return a mask of the elements that are finite in the reference only; ``None`` if there are none."""
    if value is reference or value.shape != reference.shape:
        return None
    mask = reference.isfinite() & ~value.isfinite()
    return mask if bool(mask.any()) else None


def as_complex(parts: torch.Tensor) -> torch.Tensor:
    """Return the complex tensor with these ``components``."""
    return torch.view_as_complex(parts.contiguous())


def rounded_components(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float32 or complex64 with its components rounded to float16.

    Avoids complex32, whose tensors make torch warn.
    """
    if tensor.is_complex():
        return as_complex(components(tensor).to(torch.float16).float())
    return tensor.to(torch.float16).float()


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
    flushed: int = 0
    subnormal: int = 0
    min_nonzero: float | None = None
    max_relative: float = 0.0
    max_error: float = 0.0
    exponents: Bins = field(default_factory=dict)

    def add(self, other: SampleStatistics) -> None:
        """Merge another batch's samples into these."""
        for name in ("sampled", "zeros", "flushed", "subnormal"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_relative = max(self.max_relative, other.max_relative)
        self.max_error = max(self.max_error, other.max_error)
        least = [x for x in (self.min_nonzero, other.min_nonzero) if x is not None]
        self.min_nonzero = min(least, default=None)
        for exponent, count in other.exponents.items():
            self.exponents[exponent] = self.exponents.get(exponent, 0) + count


@dataclass(slots=True)
class Samples:
    """Collects samples on the device and reduces them in blocks."""

    min_normal: float  # smallest normal number of the 16-bit format
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
        for site, (zeros, flushed, subnormal), least, worst, widest, bins in fetched:
            exponents = {index + EXPONENT_LOW: count for index, count in enumerate(bins) if count}
            statistics = SampleStatistics(
                sampled=reference.shape[1],
                zeros=zeros,
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


@dataclass(slots=True)
class Observation:
    """The measurements of one site, merged over batches (maxima, minima, sums).

    Peaks, counts and errors cover all elements, ``samples`` only the sampled ones. ``inside_peak`` is the
    largest square inside a norm, ``batch_peaks`` the FP32 peak of each batch (or call) by its number.
    """

    elements: int = 0
    batches: int = 0
    ref_peak: float = 0.0
    peak: float = 0.0
    pos_inf: float = 0.0
    neg_inf: float = 0.0
    nan: float = 0.0
    err_sq: float = 0.0
    ref_sq: float = 0.0
    bad_ref_peak: float = 0.0
    ref_bad: float = 0.0
    local_err_sq: float = 0.0
    local_ref_sq: float = 0.0
    local_elements: int = 0
    inside_peak: float = 0.0
    batch_peaks: dict[int, float] = field(default_factory=dict)
    samples: SampleStatistics = field(default_factory=SampleStatistics)

    @property
    def peak_batch(self) -> int:
        """The number of the batch with the largest peak."""
        return max(self.batch_peaks, key=lambda number: self.batch_peaks[number], default=0)

    def merge(self, fields: dict[str, float], elements: int, number: int = 0) -> None:
        """Add one batch's measured fields."""
        self.elements += elements
        self.batches += 1
        self.batch_peaks[number] = max(self.batch_peaks.get(number, 0.0), fields["ref_peak"])
        for name, value in fields.items():
            old = getattr(self, name)
            setattr(self, name, max(old, value) if name in _MAXIMA else old + value)

    def join(self, later: Observation) -> None:
        """Add the measurements of later batches."""
        for name in self.__dataclass_fields__:
            if name not in _JOINED_SEPARATELY:
                old, new = getattr(self, name), getattr(later, name)
                setattr(self, name, max(old, new) if name in _MAXIMA else old + new)
        for number, peak in later.batch_peaks.items():
            self.batch_peaks[number] = max(self.batch_peaks.get(number, 0.0), peak)
        self.samples.add(later.samples)

    @property
    def bad(self) -> int:
        """Count elements that are inf or NaN in 16 bits but not in FP32."""
        return int(self.pos_inf + self.neg_inf + self.nan)

    @property
    def finite_peak(self) -> float:
        """The larger of both runs' finite peaks."""
        return max(self.ref_peak, self.peak)

    @property
    def sqnr_db(self) -> float | None:
        """Accumulated signal-to-noise ratio, 10 log10(sum ref^2 / sum err^2); ``None`` without error."""
        return signal_to_noise_db(self.ref_sq, self.err_sq)

    @property
    def local_sqnr_db(self) -> float | None:
        """The same for this op alone, computed on the reference's inputs rounded to 16 bits."""
        return signal_to_noise_db(self.local_ref_sq, self.local_err_sq)


assert set(FIELDS) <= set(Observation.__dataclass_fields__), "an observation holds every measured field"
