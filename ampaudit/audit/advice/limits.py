"""Judges a limit on a residual stream, such as a clamp to 65504, by its error, and rescales the stream.

FP32 without the limit is what the model would compute in a wider format. The limit acts there as well, so its
error is no rounding: it is measured, and compared with that of the rescaled stream in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ampaudit.audit.advice.attempts import Attempt, Attempts, decibels, outputs_text, worst_db
from ampaudit.audit.advice.interface import Proposal
from ampaudit.audit.advice.residual import ResidualRescale, residual_rescale
from ampaudit.audit.advice.residual_call import Stream
from ampaudit.audit.advice.residual_stream import find_stream
from ampaudit.audit.checks import CheckContext
from ampaudit.audit.checks.range import limited_peak
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number
from ampaudit.report.finding import Finding, Trial
from ampaudit.run.observer import Pair
from ampaudit.trace import Site
from ampaudit.trace.edits import Bypass

__all__ = ["LimitedStreams"]

Outputs = list[dict[str, Pair]]


@dataclass(frozen=True, slots=True)
class LimitedStreams:
    """Tries to rescale streams that limits act on; each stream once."""

    attempts: Attempts
    known: dict[frozenset[str], tuple[Trial, frozenset[SiteId]] | None] = field(default_factory=dict)

    def trial(self, finding: Finding, before: frozenset[SiteId]) -> Trial | None:
        """Return the rescaled stream as a change, if that removes the finding."""
        context = self.attempts.subject.context
        site = context.site.get(finding.site)
        if site is None or site not in context.graph_sites:
            return None
        stream = find_stream(context.flow, site, context.number_format.max)
        if not isinstance(stream, Stream):
            return None
        sites = (context.flow.site(node) for node in stream.clamps)
        acting = [each for each in sites if each is not None and limited_peak(context, each) is not None]
        key = frozenset(stream.weights)
        if acting and key not in self.known:
            self.known[key] = self._tried(site, acting)
        found = self.known.get(key) if acting else None
        return found[0] if found is not None and finding.site not in found[1] <= before else None

    def _tried(self, site: Site, limits: list[Site]) -> tuple[Trial, frozenset[SiteId]] | None:
        subject, kept, rescaled = self.attempts.subject, Outputs(), Outputs()
        edits = {each.id: Bypass() for each in limits}
        without = self.attempts.audit(Proposal("rewrite", "", "", edits=edits), kept)
        if without is None:
            return None
        peaks = {each.id: without.observed(each.id).ref_peak for each in without.graph_sites}
        form = subject.context.number_format
        change = residual_rescale(subject.model, subject.context.flow, site, peaks, form)
        if not isinstance(change, ResidualRescale):
            return None
        proposal = Proposal("rescale", change.change, change.paste, model=change.applied(subject.model))
        after = self.attempts.audit(proposal, rescaled)
        if after is None or not change.is_in(subject.context.flow, after.flow) or not _same(kept, rescaled):
            return None
        attempt = self.attempts.judged(after)
        if not attempt.keeps:
            return None
        left = frozenset(finding.site for finding in attempt.left)
        return _trial(change, (subject.context, without), attempt, limits), left


def _same(first: Outputs, second: Outputs) -> bool:
    """Return whether both runs have bitwise equal FP32 outputs."""
    pairs = [(a[name][0], b[name][0]) for a, b in zip(first, second, strict=True) for name in a]
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


def _trial(
    change: ResidualRescale, before: tuple[CheckContext, CheckContext], attempt: Attempt, limits: list[Site]
) -> Trial:
    """Compare the error that limits make with that of the rescaled stream."""
    context, without = before
    errors, cost = len(attempt.left), worst_db(without.record.edited)
    makers = (context.flow.makers(each)[0] for each in limits)
    peak = max(without.observed(maker.id).ref_peak for maker in makers)
    limit = context.observed(limits[0].id).ref_peak
    where = f"{limits[0].id}{f' and {len(limits) - 1} more' if len(limits) > 1 else ''}"
    return Trial(
        "rescale",
        f"{change.change}, without what {where} cuts off",
        change.paste,
        f"{where} limits {format_number(peak)} to {format_number(limit)} in FP32 as well, "
        f"{cost:.0f} dB against FP32 without it",
        f"no limit acts; against FP32 without it, {outputs_text(attempt.context, errors)}",
        outcome="fix" if errors else "cure",
        left=errors,
        before_db=round(cost, 2),
        after_db=decibels(attempt.context),
    )
