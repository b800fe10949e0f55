"""Finds the loss scales at which nothing overflows and little is flushed, from the exponents of one run.

A gradient g under the scale s is rounded as s * g. It becomes zero if |s * g| is at most half of the format's
smallest subnormal number, and infinite from half an ulp beyond its largest. Scales are powers of two, so that
both are questions about whole exponents: nothing is run again.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ampaudit.core.formats import NumberFormat
from ampaudit.report.gradients import LayerScales, ScaleAdvice, ScaleRow
from ampaudit.run.backward.record import GradientStats

__all__ = [
    "SHARE",
    "TABLE",
    "NamedGradient",
    "advice_on_scale",
    "highest_exponent",
]

SHARE = 0.05  # of a layer's gradient elements; what is flushed below it carries next to nothing
TABLE = range(25)  # exponents of the scales in the table
_SEARCHED = range(-40, 65)


@dataclass(frozen=True, slots=True)
class NamedGradient:
    """A 16-bit gradient with its name and layer."""

    name: str
    layer: str
    stats: GradientStats


def advice_on_scale(
    gradients: Iterable[NamedGradient], form: NumberFormat, scale: float, share: float = SHARE
) -> ScaleAdvice | None:
    """Return the suitable scales; ``None`` if no gradient is stored in 16 bits.

    Args:
        gradients: of sites and parameters, in graph order; others than 16-bit ones are left out.
        form: the 16-bit format.
        scale: the run's own.
        share: of a layer's gradient elements that may be flushed.
    """
    by_layer: defaultdict[str, list[NamedGradient]] = defaultdict(list)
    for gradient in gradients:
        if gradient.stats.low_precision and gradient.stats.nonzero:
            by_layer[gradient.layer].append(gradient)
    if not by_layer:
        return None
    layers = tuple(_layer(layer, found, form, scale, share) for layer, found in by_layer.items())
    lowest = max(layers, key=lambda found: found.low)
    highest = min(layers, key=lambda found: found.high)
    everything = [gradient for found in by_layer.values() for gradient in found]
    return ScaleAdvice(
        share, layers, _table(everything, form), lowest.low, highest.high, lowest.layer, highest.layer
    )


def _layer(
    layer: str, gradients: Sequence[NamedGradient], form: NumberFormat, scale: float, share: float
) -> LayerScales:
    exponents = _together(gradients)
    total = sum(exponents.values())
    first = max(gradients, key=lambda gradient: gradient.stats.peak)
    fits = (k for k in _SEARCHED if _flushed(exponents, form, 2.0**k) <= share * total)
    return LayerScales(
        layer=layer,
        low=next(fits, _SEARCHED[-1]),
        high=highest_exponent(first.stats.peak, form),
        high_at=first.name,
        elements=total,
        flushed=_flushed(exponents, form, scale) / total,
        peak=first.stats.peak,
    )


def _table(gradients: Sequence[NamedGradient], form: NumberFormat) -> tuple[ScaleRow, ...]:
    exponents = _together(gradients)
    total = sum(exponents.values())
    return tuple(
        ScaleRow(
            exponent,
            _flushed(exponents, form, 2.0**exponent) / total,
            sum(gradient.stats.peak * 2.0**exponent >= form.overflow_at for gradient in gradients),
        )
        for exponent in TABLE
    )


def _together(gradients: Iterable[NamedGradient]) -> Counter[int]:
    total: Counter[int] = Counter()
    for gradient in gradients:
        total.update(gradient.stats.exponents)
    return total


def _flushed(exponents: Counter[int], form: NumberFormat, scale: float) -> int:
    """Count elements with 2^e < g <= 2^(e+1) that round to zero: 2^(e+1) * scale <= flush_below."""
    last = math.floor(math.log2(form.flush_below) - math.log2(scale)) - 1
    return sum(count for e, count in exponents.items() if e <= last)


def highest_exponent(peak: float, form: NumberFormat) -> int:
    """Return the largest k for which peak * 2^k does not round to infinity, up to the search limit."""
    if peak == 0.0:
        return _SEARCHED[-1]
    k = min(math.floor(math.log2(form.overflow_at) - math.log2(peak)) + 1, _SEARCHED[-1])
    while math.ldexp(peak, k) >= form.overflow_at:
        k -= 1
    return k
