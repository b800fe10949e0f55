"""The result of a bound pass: a bound per site, and its assumptions."""

from __future__ import annotations

from dataclasses import dataclass

from ampaudit.bounds.interval import Interval
from ampaudit.core.assumptions import Assumption
from ampaudit.core.sites import SiteId

__all__ = ["Bound", "BoundTable"]


@dataclass(frozen=True, slots=True)
class Bound:
    """What is proved about one site.

    Attributes:
        peak: no finite input of the site makes a larger value before it is rounded; infinity if unknown.
        proved: whether that is within the format of the site.
        inside: of a norm or variance, a bound on the largest square that it computes; ``None`` of other ops.
    """

    peak: float
    proved: bool
    inside: float | None = None

    def joined(self, other: Bound) -> Bound:
        """What holds in two graphs that have the site."""
        insides = [each.inside for each in (self, other) if each.inside is not None]
        both = self.proved and other.proved
        return Bound(max(self.peak, other.peak), both, max(insides, default=None))


@dataclass(frozen=True, slots=True)
class BoundTable:
    """The result of a bound pass.

    Attributes:
        bounds: by site.
        intervals: by node name, for tests and for the search of ``--stress``.
        assumed: what the proof rests on.
        uncovered: ops without a transfer function, or called in a way that it does not know; their values are
            taken to be anything.
        failed: ops whose transfer function broke its contract: a defect, which tests look for.
    """

    bounds: dict[SiteId, Bound]
    intervals: dict[str, Interval | list[Interval]]
    assumed: tuple[Assumption, ...]
    uncovered: tuple[str, ...]
    failed: tuple[str, ...] = ()

    def joined(self, other: BoundTable) -> BoundTable:
        """What holds for this graph and another one of the same model; intervals are this one's."""
        bounds = dict(self.bounds)
        for site, found in other.bounds.items():
            bounds[site] = bounds[site].joined(found) if site in bounds else found
        uncovered = tuple(sorted({*self.uncovered, *other.uncovered}))
        return BoundTable(bounds, self.intervals, self.assumed, uncovered, (*self.failed, *other.failed))

    @property
    def proved(self) -> frozenset[SiteId]:
        """Sites that do not overflow unless an earlier site does."""
        return frozenset(site for site, found in self.bounds.items() if found.proved)
