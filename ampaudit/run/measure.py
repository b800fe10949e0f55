"""Exact statistics of one value against its reference, as a short vector of numbers.

Two routines fill the same fields. ``measure_any`` works on every device without looking at a result, so
nothing waits for the device. ``measure_cpu`` walks through blocks that fit the cache and takes a shorter
way where a block is finite, which is nearly always; a block that is not goes to ``measure_any``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["FIELDS", "measure_any", "measure_cpu"]

FIELDS = (
    "ref_peak",  # largest finite |reference|
    "peak",  # largest finite |value|
    "pos_inf",  # +inf where the reference is finite
    "neg_inf",  # -inf where the reference is finite
    "nan",  # NaN where the reference is not NaN
    "err_sq",  # sum of (value - reference)^2 over pairs of finite elements
    "ref_sq",  # sum of reference^2 over the same pairs
    "max_err",  # largest |value - reference| over the same pairs
    "bad_ref_peak",  # largest |reference| among the elements that went wrong
    "ref_bad",  # NaN or +inf in the reference itself
)
_MERGE_MAX = (True, True, False, False, False, False, False, True, True, False)
# 1 MiB of float32: block, its reference and the scratch block stay in a core's cache
BLOCK = 1 << 18


def measure_any(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The fields as a float64 vector on the tensors' device. Both inputs are float vectors, same length."""
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
        _peak(difference, zero),
        _peak(torch.where(wrong, ref_clean, 0), zero),
        (reference.isnan() | (reference == math.inf)).sum().double(),
    )
    return torch.stack(fields)


def measure_cpu(reference: torch.Tensor, value: torch.Tensor) -> list[float]:
    """The same fields as Python numbers, for CPU tensors in float32."""
    merged = [0.0] * len(FIELDS)
    same = reference is value
    for start in range(0, value.numel(), BLOCK):
        v = value[start : start + BLOCK]
        r = v if same else reference[start : start + BLOCK]
        _merge(merged, _measure_block(r, v, same))
    return merged


def _measure_block(reference: torch.Tensor, value: torch.Tensor, same: bool) -> Sequence[float]:
    peak = _peak_of(value)
    ref_peak = peak if same else _peak_of(reference)
    if not (math.isfinite(peak) and math.isfinite(ref_peak)):
        return [float(x) for x in measure_any(reference, value).tolist()]
    if same:
        ref_sq = _sum_of_squares(reference)
        return (ref_peak, peak, 0.0, 0.0, 0.0, 0.0, ref_sq, 0.0, 0.0, 0.0)
    difference = value - reference
    return (
        *(ref_peak, peak, 0.0, 0.0, 0.0),
        *(_sum_of_squares(difference), _sum_of_squares(reference), _peak_of(difference)),
        *(0.0, 0.0),
    )


def _merge(into: list[float], other: Sequence[float]) -> None:
    for index, takes_max in enumerate(_MERGE_MAX):
        into[index] = max(into[index], other[index]) if takes_max else into[index] + other[index]


def _peak(value: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return value.abs().amax() if value.numel() else zero


def _peak_of(value: torch.Tensor) -> float:
    """Largest magnitude, NaN if there is one: one pass over the block."""
    low, high = torch.aminmax(value)
    lowest, highest = low.item(), high.item()
    return math.nan if lowest != lowest else max(-lowest, highest)


def _sum_of_squares(value: torch.Tensor) -> float:
    total = torch.dot(value, value).item()
    # beyond 1e19 a float32 sum of squares overflows, below 1e-19 it vanishes
    if 1e-30 < total < math.inf:
        return total
    wide = value.double()
    return torch.dot(wide, wide).item()
