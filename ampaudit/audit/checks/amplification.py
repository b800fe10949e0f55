"""Finds where a small error grows on its way to an output."""

from __future__ import annotations

from dataclasses import dataclass

from ampaudit.audit.checks.cancellation import subtracts
from ampaudit.audit.checks.interface import CheckContext
from ampaudit.core.sites import SiteId
from ampaudit.trace import Role

__all__ = ["Amplification", "amplified"]

NOTICEABLE_DB = 10.0


@dataclass(frozen=True, slots=True)
class Amplification:
    """The op after a culprit at which the accuracy drops most.

    Attributes:
        site: where.
        before: accuracy of its least accurate input in dB.
        after: accuracy of its result in dB.
        cancels: whether it is a difference of nearly equal values.
    """

    site: SiteId
    before: float
    after: float
    cancels: bool


def amplified(context: CheckContext, culprit: SiteId, output: str) -> Amplification | None:
    """Return the largest drop in accuracy between a culprit and an output; ``None`` if there is none."""
    found: list[Amplification] = []
    behind, leading = {culprit}, _leading_to(context, output)
    for site in context.graph_sites:
        makers = [maker.id for maker in context.flow.makers(site)]
        if not behind.intersection(makers):
            continue
        behind.add(site.id)
        after = context.observed(site.id).sqnr_db
        known = [db for maker in makers if (db := context.observed(maker).sqnr_db) is not None]
        if site.id in leading and site.role is Role.COMPUTE and after is not None and known:
            found.append(Amplification(site.id, min(known), after, subtracts(context, site)))
    worst = max(found, key=lambda a: a.before - a.after, default=None)
    return worst if worst is not None and worst.before - worst.after >= NOTICEABLE_DB else None


def _leading_to(context: CheckContext, output: str) -> set[SiteId]:
    """Return the site that makes an output and all sites that it depends on."""
    leading = {site for name, site, _ in context.outputs if name == output and site is not None}
    for site in reversed(context.graph_sites):
        if site.id in leading:
            leading |= {maker.id for maker in context.flow.makers(site)}
    return leading
