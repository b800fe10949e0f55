"""Computes exact statistics of a value against its reference as a short vector of numbers.

Three routines fill the same fields. ``measure_any`` works on every device without synchronizing.
``measure_on_device`` does the same in a single kernel where it can, on CUDA with Triton (``fused``).
``measure_cpu`` processes blocks that fit the cache. Finite blocks, nearly all, take a shorter path that reads
each element four times, all but once from the cache; other blocks go to ``measure_any``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch

from ampaudit.run.views import flat_pair

__all__ = ["BLOCK", "FIELDS", "BlockMeasure", "measure_any", "measure_cpu", "measure_on_device"]

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
_MERGE_MAX = (True, True, False, False, False, False, False, True, False)
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
    """Like ``measure_any``, in one kernel if possible; the dtypes may differ."""
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


def measure_cpu(reference: torch.Tensor, value: torch.Tensor, near: float = math.inf) -> list[float]:
    """Return the fields as Python numbers, for CPU tensors.

    Args:
        reference: A float vector.
        value: A vector of the same length, or the same object.
        near: Reference peak from which the value's own peak is measured as well.
    """
    merged = [0.0] * len(FIELDS)
    same = reference is value
    for start in range(0, value.numel(), BLOCK):
        v = value[start : start + BLOCK]
        r = v if same else reference[start : start + BLOCK]
        _merge(merged, _measure_block(r, v, same, near))
    return merged


class BlockMeasure:
    """Measures a CPU value block by block while it is written, so that it is read once.

    Every block is searched for its peak, inf and NaN. Errors are summed over every eighth block: the
    reference has left the cache by then, and reading all of it would cost as much as the rest. Tensors of up
    to 262,144 elements are a single block, and so exact.

    Attributes:
        fields: The merged fields so far, in the order of ``FIELDS``.
        elements: Number of elements measured so far.
    """

    def __init__(self, reference: torch.Tensor, near: float) -> None:
        self.fields = [0.0] * len(FIELDS)
        self.elements = 0
        self._blocks = 0
        self._reference = reference
        self._near = near
        self._scratch = torch.empty(min(BLOCK, reference.numel()), dtype=reference.dtype)

    def vector_for(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the reference as a vector in a dense tensor's memory order, if its layout is the same."""
        if tensor.shape != self._reference.shape or tensor.stride() != self._reference.stride():
            return None
        return flat_pair(self._reference, self._reference)[0]

    def add(self, reference: torch.Tensor, block: torch.Tensor) -> None:
        """Measure one block and the corresponding part of the reference."""
        self.elements += block.numel()
        self._blocks += 1
        if self._blocks % ERROR_EVERY != 1:
            peak = _peak_of(block)
            if peak < self._near:
                self.fields[0] = max(self.fields[0], peak)
                self.fields[1] = max(self.fields[1], peak)
                return
        _merge(self.fields, _measure_block(reference, block, False, self._near, self._scratch))


def _measure_block(
    reference: torch.Tensor, value: torch.Tensor, same: bool, near: float, scratch: torch.Tensor | None = None
) -> Sequence[float]:
    ref_peak = _peak_of(reference)
    difference = None
    if not same:
        into = None if scratch is None else scratch[: value.numel()]
        difference = torch.sub(value, reference, out=into)
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


def _peak_of(value: torch.Tensor) -> float:
    """Return the largest magnitude; NaN or infinity if there is one.

    Positive floats are ordered like their bits, and comparing integers is twice as fast, since it needs no
    check for NaN; a positive NaN is the largest of all. The minimum finds negative values and NaN.
    """
    lowest: float = value.amin().item()
    if value.dtype is not torch.float32:
        return max(-lowest, value.amax().item()) if lowest == lowest else lowest
    highest: float = value.view(torch.int32).amax().view(torch.float32).item()
    return max(-lowest, highest) if lowest == lowest and highest == highest else math.nan


def _sum_of_squares(value: torch.Tensor) -> float:
    total = torch.dot(value, value).item()
    # beyond 1e19 a float32 sum of squares overflows, below 1e-19 it vanishes
    if 1e-30 < total < math.inf:
        return total
    wide = value.double()
    return torch.dot(wide, wide).item()
