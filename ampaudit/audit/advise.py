"""``scan --advise``: tries each proposed change and keeps those that work."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ampaudit.audit.advice import AdviceContext, Proposal, diff_of, proposals
from ampaudit.audit.checks import ALL_CHECKS, CheckContext, Finding, Severity, run_checks
from ampaudit.audit.checks.mixed_dtypes import refused_sites
from ampaudit.audit.checks.suppress import Suppression, suppressed
from ampaudit.audit.config import ScanConfig
from ampaudit.audit.context import context_of
from ampaudit.core.config import silent
from ampaudit.core.errors import AuditError
from ampaudit.core.formats import low_precision_format
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number
from ampaudit.report.finding import Trial
from ampaudit.run.audit import RunConfig, run_audits
from ampaudit.run.outputs import OutputComparison
from ampaudit.source import ModelSource
from ampaudit.trace.isolation import call_unchanged
from ampaudit.trace.values import dtype_name

__all__ = ["advised"]

TRIED = 8  # errors; each costs a run or two
KEPT = 2  # changes per error: the smallest, and one of another kind
ALIKE_DB = 3.0  # rounding alone makes alternatives differ by less
EXACT_DB = 80.0  # no 16-bit format shows more

Errors = frozenset[tuple[str, SiteId]]


def advised(
    findings: Sequence[Finding],
    source: ModelSource,
    plan: RunConfig,
    context: CheckContext,
    settings: ScanConfig,
    hiding: Sequence[Suppression] = (),
) -> tuple[Finding, ...]:
    """Return the findings with the smallest changes that removed each of the first errors."""
    assert plan.rules is not None
    subject = AdviceContext(source.model, plan.rules, context)
    errors = [f for f in findings if f.severity is Severity.ERROR and f.suppressed is None][:TRIED]
    if not errors:
        return tuple(findings)
    refused = refused_sites(context)
    advisor = _Advisor(subject, source, plan, settings, _errors(findings), refused, tuple(hiding))
    tried: dict[int, tuple[Trial, ...]] = {}
    for number, finding in enumerate(errors):
        settings.on_progress(f"trying changes for {finding.site}", number, len(errors))
        tried[id(finding)] = advisor.trials(finding)
    return tuple(replace(f, tried=tried[id(f)]) if id(f) in tried else f for f in findings)


def _errors(findings: Sequence[Finding]) -> Errors:
    """Return the errors that are not suppressed."""
    counted = (f for f in findings if f.severity is Severity.ERROR and f.suppressed is None)
    return frozenset((f.code, f.site) for f in counted)


@dataclass(frozen=True, slots=True)
class _Advisor:
    """Tries changes to one model.

    Attributes:
        before: the errors without any change.
        refused: sites where torch refuses the dtypes without any change.
        hiding: the suppressions of the scan; an error that they hide is none.
    """

    subject: AdviceContext
    source: ModelSource
    plan: RunConfig
    settings: ScanConfig
    before: Errors
    refused: frozenset[SiteId]
    hiding: tuple[Suppression, ...]

    def trials(self, finding: Finding) -> tuple[Trial, ...]:
        """Return the smallest change that removes a finding, and one of another kind; cures come first."""
        found: list[Trial] = []
        for alternatives in proposals(self.subject, finding):
            if sum(trial.outcome == "cure" for trial in found) == KEPT:
                break
            if any(trial.kind == alternatives[0].kind for trial in found):
                continue
            best = _best([trial for p in alternatives if (trial := self._tried(p, finding)) is not None])
            found += [best] if best is not None else []
        found.sort(key=lambda trial: trial.outcome != "cure")
        return tuple(found[:KEPT])

    def _tried(self, proposal: Proposal, finding: Finding) -> Trial | None:
        """Try a change; ``None`` unless it removes the finding and keeps the user's function."""
        after = self._run(proposal)
        if after is None or not refused_sites(after) <= self.refused:
            return None
        left = _errors(suppressed(run_checks(after, ALL_CHECKS), self.hiding))
        sites = {site for _, site in left}
        if finding.site in sites or not sites <= {site for _, site in self.before}:
            return None
        least, record = self.settings.min_sqnr, after.record
        if not left and not _accurate(record.outputs, least):
            return None
        # where errors are left, the outputs do not tell whether the function is kept: FP32 does
        if (left or not proposal.by_dtype) and not _accurate(record.edited, least):
            return None
        context = self.subject.context
        return Trial(
            proposal.kind,
            proposal.change,
            proposal.paste,
            _text(context, finding, len(self.before)),
            _text(after, finding, len(left)),
            outcome="fix" if left else "cure",
            left=len(left),
            before_db=_decibels(context.record.outputs),
            after_db=_decibels(after.record.outputs),
            diff=diff_of(proposal) if self.settings.diff and not self.source.names_files else "",
        )

    def _run(self, proposal: Proposal) -> CheckContext | None:
        """Audit under a change; ``None`` if it cannot be run or changes the function."""
        plan = self.plan
        form = low_precision_format(proposal.dtype) if proposal.dtype else plan.number_format
        changed = replace(
            plan,
            number_format=form,
            rules=proposal.rules or plan.rules,
            edits=proposal.edits,
            min_sqnr=None,
            keep_outputs=None,
        )
        model = proposal.model or self.source.model
        try:
            if proposal.model is not None and not _same_function(self.source, proposal):
                return None
            (audit,) = run_audits(model, self.source.batches, [changed], silent)
        except AuditError:
            return None
        return context_of(audit, form, self.settings.changed(prove=False, static=False))


def _best(tried: Sequence[Trial]) -> Trial | None:
    """Return the first of the most accurate alternatives; cures before fixes."""
    cures = [trial for trial in tried if trial.outcome == "cure"] or list(tried)
    found = [EXACT_DB if trial.after_db is None else min(trial.after_db, EXACT_DB) for trial in cures]
    return next((t for t, db in zip(cures, found, strict=True) if db >= max(found) - ALIKE_DB), None)


def _same_function(source: ModelSource, proposal: Proposal) -> bool:
    """Return whether both models give bitwise equal FP32 results on every batch."""
    assert proposal.model is not None
    models = (source.model, proposal.model)
    for number_, batch in enumerate(source.batches):
        made = [call_unchanged(model, batch.args, batch.kwargs, seed=number_) for model in models]
        first, second = map(torch.utils._pytree.tree_leaves, made)
        pairs = zip(first, second, strict=True)
        if not all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor)):
            return False
    return True


def _accurate(outputs: Mapping[str, OutputComparison], least: float) -> bool:
    """Return whether every output has the required accuracy."""
    found = (seen.accuracy_db for seen in outputs.values())
    return all(accuracy is None or accuracy >= least for accuracy in found)


def _worst(outputs: Mapping[str, OutputComparison]) -> float:
    """Return the lowest output accuracy in dB; infinite if all are exact, -infinite if one is broken."""
    found = (seen.accuracy_db for seen in outputs.values())
    return min((math.inf if accuracy is None else accuracy for accuracy in found), default=math.inf)


def _decibels(outputs: Mapping[str, OutputComparison]) -> float | None:
    worst = _worst(outputs)
    return round(worst, 2) if math.isfinite(worst) else None


def _text(context: CheckContext, finding: Finding, errors: int) -> str:
    """Summarize a run in one line: the site, the outputs against the FP32 model, and the number of errors."""
    site, seen = context.site.get(finding.site), context.observed(finding.site)
    where = dtype_name(site.dtype) if site is not None else "gone"
    values = f"{finding.site} in {where}" if site is not None else f"{finding.site} is gone"
    if seen.elements:
        values += f", peak {format_number(seen.ref_peak)}" + (f", {seen.bad} inf or NaN" if seen.bad else "")
    worst = _worst(context.record.outputs)
    output = f"outputs {worst:.0f} dB" if math.isfinite(worst) else "outputs exact"
    output = "outputs broken" if worst == -math.inf else output
    return f"{values}; {output}; {errors} error{'s' if errors != 1 else ''}"
