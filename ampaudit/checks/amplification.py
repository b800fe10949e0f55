"""Where an error that is small at first becomes large on its way to an output."""

from __future__ import annotations

from dataclasses import dataclass

from ampaudit.checks.cancellation import subtracts
from ampaudit.checks.interface import CheckContext
from ampaudit.sites import SiteId
from ampaudit.trace import Role

__all__ = ["Amplification", "amplified"]

NOTICEABLE_DB = 10.0


@dataclass(frozen=True, slots=True)
class Amplification:
    """The op behind a culprit at which the accuracy falls most.

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


def amplified(context: CheckContext, culprit: SiteId) -> Amplification | None:
    """The largest fall of accuracy behind a culprit; ``None`` if there is no noticeable one."""
    found: list[Amplification] = []
    behind = {culprit}
    for site in context.graph_sites:
        makers = [maker.id for maker in context.flow.makers(site)]
        if not behind.intersection(makers):
            continue
        behind.add(site.id)
        after = context.observed(site.id).sqnr_db
        known = [db for maker in makers if (db := context.observed(maker).sqnr_db) is not None]
        if site.role is Role.COMPUTE and after is not None and known:
            found.append(Amplification(site.id, min(known), after, subtracts(context, site)))
    worst = max(found, key=lambda a: a.before - a.after, default=None)
    return worst if worst is not None and worst.before - worst.after >= NOTICEABLE_DB else None
