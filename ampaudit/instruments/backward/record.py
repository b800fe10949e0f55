"""The record of a backward pass: one entry per gradient, and the ops that broke one.

A gradient g under the scale s is rounded as s * g. It becomes zero if |s * g| is at most half of the format's
smallest subnormal number, and infinite from half an ulp beyond its largest. Scales are powers of two, so that
counts of exponents suffice to evaluate any scale without another run.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from ampaudit.core.formats import NumberFormat
from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.report.gradients import LayerScales, ScaleAdvice, ScaleRow
from ampaudit.run.measure import AS_RUN, Observation

SHARE = 0.05  # share of a layer's gradient elements that may be flushed: they contribute next to nothing
TABLE = range(25)  # exponents of the scales in the table
_SEARCHED = range(-40, 65)


@dataclass(slots=True)
class GradientStats:
    """Statistics of one gradient, summed over batches: of a site's output or a parameter."""

    low_precision: bool = False  # whether it is stored in 16 bits
    # peaks, counts and errors of the scaled gradient, as for a value
    values: Observation = field(default_factory=Observation)
    nonzero: int = 0  # number of elements that are not zero in FP32
    flushed: int = 0  # number of these that are zero in 16 bits
    # counts of FP32's nonzero magnitudes g, without the loss scale, by the e of 2^e < g <= 2^(e+1)
    exponents: Annotated[Counter[int], *AS_RUN] = field(default_factory=Counter)
    peak: float = 0.0  # FP32's largest magnitude, without the loss scale
    cancelled: bool = False  # whether it is a sum over a batch that cancels in FP32 up to rounding errors

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
        """The share of elements that are zero in 16 bits but not in FP32."""
        return self.flushed / self.nonzero if self.nonzero else 0.0

    def flushed_at(self, scale: float, form: NumberFormat) -> float:
        """Return the share of FP32's elements that a format rounds to zero under a scale."""
        return _flushed(self.exponents, form, scale) / self.nonzero if self.nonzero else 0.0


@dataclass(frozen=True, slots=True)
class GradientOrigin:
    """An op whose backward computed inf or NaN from finite gradients and values."""

    site: SiteId  # the op; of several that share a value, the one at which their sum broke
    value: str  # the site whose output has this gradient, or the parameter's name
    is_parameter: bool  # whether ``value`` is a parameter's name
    batch: int  # number of the first batch in which it broke, from 0
    custom: str = ""  # the custom backward or hook that broke, such as ``Scale.backward``; empty for torch's
    op: str = ""  # the op in the custom backward, if known
    source: SourceLine | None = None  # line of that op, or definition of the custom backward


@dataclass(frozen=True, slots=True)
class UntracedBackward:
    """A custom backward or hook that could not be traced."""

    site: SiteId  # site of the output whose gradient it takes
    name: str  # name, such as ``Scale.backward``
    reason: str  # why it could not be traced
    source: SourceLine | None  # line that stopped the trace, or definition
    instead: str  # ``as a whole`` if it was called, ``left out`` for a hook; empty if gradients stop there


@dataclass(slots=True)
class GradientRecord:
    """The gradients of one audit."""

    scale: float  # the loss scale
    dynamic: bool = True  # whether training lowers the scale when gradients overflow
    scale_from: str = ""  # source of the scale
    least: float = 0.0  # lower limit of a dynamic scale
    sites: dict[SiteId, GradientStats] = field(default_factory=dict)  # gradients of sites' outputs
    # gradients of parameters, by name, in the dtype in which they are stored
    parameters: dict[str, GradientStats] = field(default_factory=dict)
    # ops whose backward broke a gradient, in the order of the backward pass
    origins: list[GradientOrigin] = field(default_factory=list)
    # for each batch, the loss in FP32, in 16 bits, and in 16 bits with all faults of the forward pass
    # repaired; without the scale
    losses: list[tuple[float, float, float]] = field(default_factory=list)
    frozen: tuple[str, ...] = ()  # parameters that do not require a gradient
    # parameters that require a gradient, with the first name of each tied one
    trainable: dict[str, str] = field(default_factory=dict)
    behind: set[str] = field(default_factory=set)  # parameters behind a custom backward that could not run
    notes: list[str] = field(default_factory=list)  # deviations from training
    # custom backwards that could not be traced
    untraced: list[UntracedBackward] = field(default_factory=list)

    @property
    def unused(self) -> tuple[str, ...]:
        """The trainable parameters on which no loss depends, under any of their names."""
        used = {self.trainable[name] for name in self.parameters if name in self.trainable}
        unreached = self.trainable.keys() - self.parameters.keys() - self.behind
        return tuple(sorted(name for name in unreached if self.trainable[name] not in used))

    def empty_copy(self) -> GradientRecord:
        """Return an empty record with the same loss scale."""
        return GradientRecord(self.scale, self.dynamic, self.scale_from, self.least)

    def joined(self, later: GradientRecord) -> GradientRecord:
        """Return the gradients of both, those of later batches last."""
        both = self.empty_copy()
        both._add(self)
        both._add(later)
        return both

    def _add(self, later: GradientRecord) -> None:
        tables: tuple[tuple[dict[Any, GradientStats], dict[Any, GradientStats]], ...] = (
            (self.sites, later.sites),
            (self.parameters, later.parameters),
        )
        for mine, theirs in tables:
            for name, stats in theirs.items():
                mine.setdefault(name, GradientStats(stats.low_precision)).join(stats)
        origins = {(origin.site, origin.value) for origin in self.origins}
        self.origins += [o for o in later.origins if (o.site, o.value) not in origins]
        untraced = {(backward.site, backward.name) for backward in self.untraced}
        self.untraced += [u for u in later.untraced if (u.site, u.name) not in untraced]
        self.losses += later.losses
        self.frozen = tuple(sorted({*self.frozen, *later.frozen}))
        self.trainable = later.trainable | self.trainable
        self.behind |= later.behind
        self.notes += [note for note in later.notes if note not in self.notes]

    def broken_at(self, origin: GradientOrigin) -> GradientStats | None:
        """Return the gradient that broke at an origin; ``None`` if it was not measured."""
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
        gradients: Gradients of sites and parameters in graph order; only those in 16 bits are used.
        form: The 16-bit format.
        scale: Loss scale of the run.
        share: Share of a layer's gradient elements that may be flushed.
    """
    by_layer: defaultdict[str, list[NamedGradient]] = defaultdict(list)
    for gradient in gradients:
        if gradient.stats.low_precision and gradient.stats.nonzero:
            by_layer[gradient.layer].append(gradient)
    if not by_layer:
        return None
    layers = tuple(_layer(layer, members, form, scale, share) for layer, members in by_layer.items())
    lowest = max(layers, key=lambda layer: layer.low)
    highest = min(layers, key=lambda layer: layer.high)
    everything = list(itertools.chain.from_iterable(by_layer.values()))
    return ScaleAdvice(
        share, layers, _table(everything, form), lowest.low, highest.high, lowest.layer, highest.layer
    )


def _layer(
    layer: str, gradients: Sequence[NamedGradient], form: NumberFormat, scale: float, share: float
) -> LayerScales:
    exponents = sum((gradient.stats.exponents for gradient in gradients), Counter[int]())
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
    exponents = sum((gradient.stats.exponents for gradient in gradients), Counter[int]())
    total = sum(exponents.values())
    return tuple(
        ScaleRow(
            exponent,
            _flushed(exponents, form, 2.0**exponent) / total,
            sum(gradient.stats.peak * 2.0**exponent >= form.overflow_at for gradient in gradients),
        )
        for exponent in TABLE
    )


def _flushed(exponents: Counter[int], form: NumberFormat, scale: float) -> int:
    """Count elements with 2^e < g <= 2^(e+1) that round to zero: 2^(e+1) * scale <= flush_below."""
    last = math.floor(math.log2(form.flush_below) - math.log2(scale)) - 1
    return sum(count for e, count in exponents.items() if e <= last)


def highest_exponent(peak: float, form: NumberFormat) -> int:
    """Return the largest k, up to the search limit, for which peak * 2^k does not round to infinity."""
    if peak == 0.0:
        return _SEARCHED[-1]
    k = min(math.floor(math.log2(form.overflow_at) - math.log2(peak)) + 1, _SEARCHED[-1])
    while math.ldexp(peak, k) >= form.overflow_at:
        k -= 1
    return k
