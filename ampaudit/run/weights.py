"""Measures the weights that the converted model stores in 16 bits, and the effect of rounding them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ampaudit.core.formats import NumberFormat, format_named
from ampaudit.run.measure import BLOCK
from ampaudit.trace.converted import ConvertedModel
from ampaudit.trace.graph import Slot
from ampaudit.trace.values import LOW_PRECISION_DTYPES, dtype_name


@dataclass(frozen=True, slots=True)
class WeightRange:
    """One weight in FP32 and in 16 bits; counts are exact."""

    name: str  # path of the weight
    parameter: bool  # whether it is a parameter, rather than a buffer or constant
    elements: int  # number of elements
    peak: float  # largest finite magnitude
    nonzero: int = 0  # number of elements that are not zero in FP32
    overflow: int = 0  # number of finite elements that become infinite
    vanish: int = 0  # number of elements that become zero
    subnormal: int = 0  # number of elements that become subnormal and so lose precision


def weight_ranges(converted: ConvertedModel, peaks: dict[str, float]) -> tuple[WeightRange, ...]:
    """Return one range per weight with a 16-bit copy, in graph order; tied weights are read once.

    ``peaks`` are those that the run has already read, by name; the others are read here.
    """
    ranges: dict[str, WeightRange] = {}
    parameters = {p.node for p in converted.traced.placeholders if p.slot is Slot.PARAMETER}
    for copy in converted.copies.values():
        master = converted.masters[copy.placeholder].detach()
        master = master.float() if master.dtype.itemsize == 1 else master  # float8 has hardly any kernel
        if copy.name in ranges or master.numel() == 0 or copy.dtype is torch.float64:
            continue
        peak = peaks.get(copy.name, math.nan)
        if not math.isfinite(peak):
            peak = float(torch.maximum(-master.amin(), master.amax()))
        finite = math.isfinite(peak)
        form = format_named(dtype_name(copy.dtype))
        unrounded = converted.unrounded(copy.placeholder, master)
        beyond = not finite or peak >= form.overflow_at
        low = copy.dtype in LOW_PRECISION_DTYPES
        ranges[copy.name] = WeightRange(
            copy.name,
            copy.placeholder in parameters,
            master.numel(),
            peak if finite else float(master.float().abs().nan_to_num(0.0, 0.0, 0.0).amax()),
            *(_counts(unrounded, copy.dtype, form, beyond) if low else ()),
        )
        if converted.release is not None:
            converted.release(master)
    return tuple(ranges.values())


def _counts(
    master: torch.Tensor, dtype: torch.dtype, form: NumberFormat, beyond: bool
) -> tuple[int, int, int, int]:
    """Count non-zero, overflowing, vanishing and subnormal elements in blocks.

    The magnitude of a 16-bit float orders like its lower 15 bits: those below the smallest normal number
    are zero or subnormal, those of all ones in the exponent are infinite.
    """
    flat = master.reshape(-1)
    edges = torch.tensor([form.min_normal, math.inf], dtype=dtype).view(torch.int16)
    normal, infinite = edges.tolist()
    rows: list[torch.Tensor] = []
    for start in range(0, flat.numel(), BLOCK):
        block = flat[start : start + BLOCK]
        half = block.to(dtype)
        bits = half.view(torch.int16).bitwise_and(0x7FFF)
        counted = [block, half, bits.lt(normal)]
        counted += [bits.eq(infinite) & block.isfinite()] if beyond else []
        rows.append(torch.stack([torch.count_nonzero(part) for part in counted]))
    nonzero, half_nonzero, tiny, *rest = torch.stack(rows).sum(0).tolist()
    zeros = flat.numel() - half_nonzero
    return nonzero, rest[0] if rest else 0, nonzero - half_nonzero, tiny - zeros
