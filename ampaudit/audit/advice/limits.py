"""Measures the error of a limit on a residual stream, such as a clamp to 65504, and rescales the stream.

The reference is FP32 without the limit, since a wider format would not need it. Because the limit also acts
in FP32, its error is not rounding; it is compared with that of the rescaled stream in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ampaudit.audit.advice.attempts import Attempt, Attempts, decibels, outputs_text, worst_db
from ampaudit.audit.advice.interface import Proposal
from ampaudit.audit.advice.residual import ResidualRescale, residual_rescale
from ampaudit.audit.advice.residual_stream import Stream, find_stream
from ampaudit.audit.checks import CheckContext
from ampaudit.audit.checks.range import limited_peak
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number
from ampaudit.report.finding import Finding, Trial
from ampaudit.run.lockstep import Pair
from ampaudit.trace import Site
from ampaudit.trace.op_calls import Bypass

__all__ = ["LimitedStreams"]

Outputs = list[dict[str, Pair]]


@dataclass(frozen=True, slots=True)
class LimitedStreams:
    """Tries to rescale the streams that limits act on, each once.

    Attributes:
        attempts: Runs the model under changes.
        trials: For the weights of each stream, the trial and the sites of the errors that remain.
    """

    attempts: Attempts
    trials: dict[frozenset[str], tuple[Trial, frozenset[SiteId]] | None] = field(default_factory=dict)

    def trial(self, finding: Finding, before: frozenset[SiteId]) -> Trial | None:
        """Return the trial of the rescaled stream, if that removes the finding and adds none."""
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
        if not acting:
            return None
        if key not in self.trials:
            self.trials[key] = self._try(site, acting)
        result = self.trials[key]
        return result[0] if result is not None and finding.site not in result[1] <= before else None

    def _try(self, site: Site, limits: list[Site]) -> tuple[Trial, frozenset[SiteId]] | None:
        subject, unlimited, rescaled = self.attempts.subject, Outputs(), Outputs()
        edits = {each.id: Bypass() for each in limits}
        without = self.attempts.audit(Proposal("rewrite", "", "", edits=edits), unlimited)
        if without is None:
            return None
        peaks = {each.id: without.observed(each.id).ref_peak for each in without.graph_sites}
        form = subject.context.number_format
        change = residual_rescale(subject.model, subject.context.flow, site, peaks, form)
        if not isinstance(change, ResidualRescale):
            return None
        proposal = Proposal("rescale", change.change, change.paste, model=change.applied(subject.model))
        after = self.attempts.audit(proposal, rescaled)
        if after is None or not change.is_in(subject.context.flow, after.flow):
            return None
        if not _same(unlimited, rescaled):
            return None
        attempt = self.attempts.judge(after)
        if not attempt.keeps:
            return None
        failing = frozenset(finding.site for finding in attempt.errors)
        return _trial(change, (subject.context, without), attempt, limits), failing


def _same(first: Outputs, second: Outputs) -> bool:
    """Return whether both runs have bitwise equal FP32 outputs."""
    pairs = [(a[name][0], b[name][0]) for a, b in zip(first, second, strict=True) for name in a]
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


def _trial(
    change: ResidualRescale, before: tuple[CheckContext, CheckContext], attempt: Attempt, limits: list[Site]
) -> Trial:
    """Compare the error that the limits cause with that of the rescaled stream."""
    context, without = before
    errors, cost = len(attempt.errors), worst_db(without.record.edited)
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
