"""Ranges of the weights that the converted model holds in 16 bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampaudit.convert import ConvertedModel
from ampaudit.trace.graph import Slot

__all__ = ["WeightRange", "weight_ranges"]


@dataclass(frozen=True, slots=True)
class WeightRange:
    """One weight in FP32: its name, element count, and largest finite magnitude.

    ``parameter`` is false for buffers and constants.
    """

    name: str
    parameter: bool
    elements: int
    peak: float
    nonfinite: bool


def weight_ranges(converted: ConvertedModel, known: dict[str, float]) -> tuple[WeightRange, ...]:
    """One range per weight that has a 16-bit copy, in graph order.

    Args:
        converted: the model.
        known: peaks of weights that the run has read already, by name; the others are read here.
    """
    ranges: dict[str, WeightRange] = {}
    parameters = {p.node for p in converted.traced.placeholders if p.slot is Slot.PARAMETER}
    for copy in converted.copies.values():
        master = converted.masters[copy.placeholder].detach()
        if copy.name in ranges or master.numel() == 0:
            continue
        peak = known.get(copy.name, math.nan)
        if not math.isfinite(peak):
            peak = max(-float(master.amin()), float(master.amax()))
        finite = math.isfinite(peak)
        ranges[copy.name] = WeightRange(
            copy.name, copy.placeholder in parameters, master.numel(), peak if finite else 0.0, not finite
        )
    return tuple(ranges.values())
