"""AMP307 and AMP308: an op whose kernel rejects the mix of dtypes, or a number, that it is given."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from ampaudit.audit.checks.interface import Check, CheckContext, finding_at
from ampaudit.core.sites import SiteId
from ampaudit.policy.schema import Cast
from ampaudit.report.finding import Finding
from ampaudit.trace import Role
from ampaudit.trace.caster import MIXED_DTYPES, TOO_LARGE
from ampaudit.trace.graph import Slot
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["CHECKS", "refused_sites"]

_ADVICE = (
    "make the dtypes agree, as with x.to(self.weight.dtype) or torch.zeros(..., dtype=x.dtype), "
    "or add a rule for the op: cast: widest"
)
_FILL = "fill with torch.finfo(x.dtype).min or with -inf, or call it on x.float()"


def find(context: CheckContext) -> Iterator[Finding]:
    """Find sites whose op raises about dtypes, by the trace's trials.

    A site that mixes dtypes only because an op before it did is left out: the same correction cures both.
    """
    if _mixed_by_policy(context):
        return
    refuses, reported = refused_sites(context), set[SiteId]()
    for traced in context.flow.every:
        promoted: set[fx.Node] = set()
        for node in traced.graph.nodes:
            site = context.flow.site(node)
            refused = site is not None and site.id in refuses
            follows = not promoted.isdisjoint(node.all_input_nodes)
            if refused or (follows and (site is None or site.role is not Role.CAST)):
                promoted.add(node)
            if site is not None and refused and not follows and site.id not in reported:
                reported.add(site.id)
                site = context.site[site.id]
                if site.decision.reason == MIXED_DTYPES:
                    cause = f"{site.decision.why}; the audit continued as if they were promoted"
                    yield finding_at(context, site, "AMP307", cause, _ADVICE, confidence="rule")


def find_numbers(context: CheckContext) -> Iterator[Finding]:
    """Find sites whose op raises about a number that the format does not hold."""
    for site in context.graph_sites:
        if site.decision.reason == TOO_LARGE:
            cause = f"{site.decision.why}; the audit continued in float32"
            yield finding_at(context, site, "AMP308", cause, _FILL, confidence="rule")


def refused_sites(context: CheckContext) -> frozenset[SiteId]:
    """Return all sites whose kernel rejects their dtypes, whatever mixed them, or a number in them."""
    refused = (MIXED_DTYPES, TOO_LARGE)
    return frozenset(site.id for site in context.graph_sites if site.decision.reason in refused)


def _mixed_by_policy(context: CheckContext) -> bool:
    """Return whether the policy itself mixes dtypes: float32 ops or weights beside 16-bit weights.

    That is not what the model's code does; a converter, or a library, casts there.
    """
    places = context.flow.traced.placeholders
    stored = {place.dtype for place in places if place.slot is Slot.PARAMETER}
    wide = any(site.decision.cast is Cast.FLOAT32 and site.decision.explicit for site in context.graph_sites)
    return not stored.isdisjoint(LOW_PRECISION_DTYPES) and (wide or torch.float32 in stored)


CHECKS = Check("AMP307", find), Check("AMP308", find_numbers)
