"""The record of a backward pass: one entry per gradient, and the ops that broke one.

A gradient g under the scale s is rounded as s * g. It becomes zero if |s * g| is at most half of the format's
smallest subnormal number, and infinite from half an ulp beyond its largest. Scales are powers of two, so that
both are questions about whole exponents: nothing is run again.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from ampaudit.core.formats import NumberFormat
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.report.gradients import LayerScales, ScaleAdvice, ScaleRow
from ampaudit.run.observation import Observation
from ampaudit.run.samples import AS_RUN

__all__ = [
    "GradientOrigin",
    "GradientRecord",
    "GradientStats",
    "NamedGradient",
    "UntracedBackward",
    "advice_on_scale",
    "highest_exponent",
]

SHARE = 0.05  # of a layer's gradient elements; what is flushed below it carries next to nothing
TABLE = range(25)  # exponents of the scales in the table
_SEARCHED = range(-40, 65)


@dataclass(slots=True)
class GradientStats:
    """Statistics of one gradient, summed over batches: of a site's output or a parameter.

    Attributes:
        low_precision: whether it is held in 16 bits.
        values: peaks, counts and errors of the scaled gradient, as for a value.
        nonzero: elements that are not zero in FP32.
        flushed: of those, the elements that are zero in 16 bits.
        exponents: counts of FP32's magnitudes g, without the loss scale, by the e of 2^e < g <= 2^(e+1);
            every element that is not zero is counted.
        peak: FP32's largest magnitude, without the loss scale.
        cancelled: whether it is a sum over a batch that nearly cancels in FP32: what is left is rounding.
    """

    low_precision: bool = False
    values: Observation = field(default_factory=Observation)
    nonzero: int = 0
    flushed: int = 0
    exponents: Annotated[Counter[int], *AS_RUN] = field(default_factory=Counter)
    peak: float = 0.0
    cancelled: bool = False

    def join(self, later: GradientStats) -> None:
        """Add the gradients of later batches."""
        self.values.join(later.values)
        self.nonzero += later.nonzero
        self.flushed += later.flushed
        self.exponents.update(later.exponents)
        self.peak = max(self.peak, later.peak)
        self.cancelled |= later.cancelled

    @property
    def flushed_share(self) -> float:
        """Return the share of elements that are zero in 16 bits but not in FP32."""
        return self.flushed / self.nonzero if self.nonzero else 0.0


@dataclass(frozen=True, slots=True)
class GradientOrigin:
    """An op whose backward made inf or NaN from finite gradients and values.

    Attributes:
        site: the op; of several that share a value, the one where the sum of theirs went wrong.
        value: the site whose output's gradient it is, or the parameter's name.
        is_parameter: which of the two ``value`` is.
        batch: number of the first batch in which it happened, from 0.
        custom: the custom backward or hook that did it, such as ``Scale.backward``; empty for torch's.
        op: the op in it, as far as one is known.
        source: that op's line, or where the custom backward is defined.
    """

    site: SiteId
    value: str
    is_parameter: bool
    batch: int
    custom: str = ""
    op: str = ""
    source: SourceLine | None = None


@dataclass(frozen=True, slots=True)
class UntracedBackward:
    """A custom backward or hook that could not be traced.

    Attributes:
        site: of the output whose gradient it takes.
        name: such as ``Scale.backward``.
        reason: why not.
        source: the line that stopped the trace, or where it is defined.
        instead: it ran ``as a whole``, or is ``left out`` if it is a hook; else nothing before it is audited.
    """

    site: SiteId
    name: str
    reason: str
    source: SourceLine | None
    instead: str


@dataclass(slots=True)
class GradientRecord:
    """The gradients of one audit.

    Attributes:
        scale: what the loss was multiplied by.
        dynamic: whether training lowers the scale when something overflows.
        scale_from: who says so.
        least: how far down, at most.
        sites: by site, the gradient of what it makes.
        parameters: by name, the gradient of a parameter, in the dtype in which it is stored.
        origins: ops whose backward broke a gradient, in the order of the backward pass.
        losses: per batch the loss in FP32, in 16 bits, and in 16 bits with all faults of the forward pass
            repaired; without the scale.
        frozen: parameters that ask for no gradient.
        trainable: by name, parameters that ask for one; the value is the first name of a tied one.
        behind: those behind a custom backward that could not run.
        notes: what was not as in training.
        untraced: custom backwards that could not be traced.
    """

    scale: float
    dynamic: bool = True
    scale_from: str = ""
    least: float = 0.0
    sites: dict[SiteId, GradientStats] = field(default_factory=dict)
    parameters: dict[str, GradientStats] = field(default_factory=dict)
    origins: list[GradientOrigin] = field(default_factory=list)
    losses: list[tuple[float, float, float]] = field(default_factory=list)
    frozen: tuple[str, ...] = ()
    trainable: dict[str, str] = field(default_factory=dict)
    behind: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    untraced: list[UntracedBackward] = field(default_factory=list)

    @property
    def unused(self) -> tuple[str, ...]:
        """Return trainable parameters that no loss depends on, under none of their names."""
        used = {self.trainable[name] for name in self.parameters if name in self.trainable}
        left = self.trainable.keys() - self.parameters.keys() - self.behind
        return tuple(sorted(name for name in left if self.trainable[name] not in used))

    def emptied(self) -> GradientRecord:
        """Return a record of the same loss scale without gradients."""
        return GradientRecord(self.scale, self.dynamic, self.scale_from, self.least)

    def join(self, later: GradientRecord) -> None:
        """Add the gradients of later batches."""
        tables: tuple[tuple[dict[Any, GradientStats], dict[Any, GradientStats]], ...] = (
            (self.sites, later.sites),
            (self.parameters, later.parameters),
        )
        for mine, theirs in tables:
            for name, stats in theirs.items():
                mine.setdefault(name, GradientStats(stats.low_precision)).join(stats)
        origins = {(origin.site, origin.value) for origin in self.origins}
        self.origins += [o for o in later.origins if (o.site, o.value) not in origins]
        untraced = {(found.site, found.name) for found in self.untraced}
        self.untraced += [u for u in later.untraced if (u.site, u.name) not in untraced]
        self.losses += later.losses
        self.frozen = tuple(sorted({*self.frozen, *later.frozen}))
        self.trainable = later.trainable | self.trainable
        self.behind |= later.behind
        self.notes += [note for note in later.notes if note not in self.notes]

    def broken_at(self, origin: GradientOrigin) -> GradientStats | None:
        """Return the gradient that broke there; ``None`` if it was not measured."""
        if origin.is_parameter:
            return self.parameters.get(origin.value)
        return self.sites.get(SiteId(origin.value))


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
