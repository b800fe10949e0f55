"""What a check is given, what it is, and how a finding about a site is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from ampaudit.checks.finding import Evidence, Finding, Kind, Severity, Source
from ampaudit.formats import NumberFormat
from ampaudit.run.record import Observation, Origin, RunRecord
from ampaudit.run.weights import WeightRange
from ampaudit.sites import SiteId
from ampaudit.trace import Role, Site

__all__ = ["Check", "CheckContext", "finding_at", "number"]


@dataclass(frozen=True)
class CheckContext:
    """Everything a check may look at.

    Attributes:
        sites: all sites in graph order.
        record: what the run saw.
        number_format: the 16-bit format of the run.
        parameter_free: sites that no parameter reaches (masks, positions, constants).
        weights: ranges of the weights that are held in 16 bits.
        users: for each site, the names of the weights that it uses directly.
        min_headroom: bits below which a site is reported.
        ranges_only: whether only FP32 ran (``--ranges``).
    """

    sites: tuple[Site, ...]
    record: RunRecord
    number_format: NumberFormat
    parameter_free: frozenset[str]
    weights: tuple[WeightRange, ...]
    users: dict[SiteId, tuple[str, ...]]
    min_headroom: float
    ranges_only: bool

    @cached_property
    def site(self) -> dict[SiteId, Site]:
        """Sites by id."""
        return {site.id: site for site in self.sites}

    @cached_property
    def broken_weights(self) -> frozenset[str]:
        """Names of weights that overflow when they are held in 16 bits."""
        return frozenset(w.name for w in self.weights if w.peak >= self.number_format.overflow_at)

    def observed(self, site: SiteId) -> Observation:
        """The observation of a site, an empty one if it has none."""
        return self.record.observations.get(site, Observation())

    def lowered(self, site: Site) -> bool:
        """Whether a site's output is in the 16-bit format of the run."""
        return site.dtype is not None and str(site.dtype) == f"torch.{self.number_format.name}"

    def from_weight(self, site: Site) -> str | None:
        """The weight whose own overflow explains an origin at this site."""
        if site.role is Role.WEIGHT_CAST and site.weight in self.broken_weights:
            return site.weight
        return next((name for name in self.users.get(site.id, ()) if name in self.broken_weights), None)

    def is_overflow(self, origin: Origin) -> bool:
        """Whether the wrong elements were beyond the format in FP32 (else a domain error made them)."""
        observation = self.observed(origin.site)
        infinite = observation.pos_inf + observation.neg_inf > 0
        return infinite and observation.bad_ref_peak >= self.number_format.max / 2


@dataclass(frozen=True, slots=True)
class Check:
    """A named question asked of a run."""

    code: str
    title: str
    find: Callable[[CheckContext], Iterable[Finding]]


def finding_at(
    context: CheckContext, site: Site, code: str, kind: Kind, severity: Severity, cause: str, advice: str
) -> Finding:
    """An observed forward finding at a site, with that site's numbers as evidence."""
    seen = context.observed(site.id)
    form = context.number_format
    peak = seen.finite_peak if seen.elements else None
    return Finding(
        code=code,
        kind=kind,
        severity=severity,
        confidence="observed",
        phase="forward",
        layer=site.layer,
        op=site.op,
        site=site.id,
        source=source_of(site),
        evidence=Evidence(
            peak=peak,
            limit=form.max,
            inf=int(seen.pos_inf + seen.neg_inf),
            nan=int(seen.nan),
            elements=seen.elements,
            headroom_bits=form.headroom_bits(peak) if peak else None,
        ),
        origin=False,
        poisons=(),
        cause=cause,
        advice=advice,
    )


def as_origin(finding: Finding, origin: Origin) -> Finding:
    """The finding as an origin with what it poisons."""
    return replace(finding, origin=True, poisons=origin.poisons)


def source_of(site: Site) -> Source | None:
    """The site's source line in the form that findings carry."""
    if site.source is None:
        return None
    return Source(site.source.file, site.source.line, site.source.code, site.caller)


def number(value: float) -> str:
    """Four significant digits as every report prints them; whole numbers to ten million in full."""
    if 1e3 <= abs(value) < 1e7:
        exact = value if value == round(value) and abs(value) < 1e5 else float(f"{value:.4g}")
        return f"{exact:,.0f}"
    return f"{value:.4g}"
