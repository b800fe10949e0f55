"""``scan --advise``: runs the model with each proposed change, and keeps what cures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ampaudit.advice import Proposal, Subject, proposals
from ampaudit.checks import ALL_CHECKS, CheckContext, Finding, Severity, run_checks
from ampaudit.errors import AuditError
from ampaudit.formats import lower_format
from ampaudit.report.finding import Trial
from ampaudit.run.audit import Plan, run_audits
from ampaudit.sites import SiteId
from ampaudit.source import ModelSource
from ampaudit.trace.calling import call_unchanged
from ampaudit.words import number
from ampaudit.workflows.context import context_of
from ampaudit.workflows.settings import Settings

__all__ = ["advised"]

TRIED = 8  # errors; each costs a run or two
KEPT = 2  # cures per error: the smallest, and one of another kind

Errors = frozenset[tuple[str, SiteId]]


def advised(
    findings: Sequence[Finding], source: ModelSource, plan: Plan, context: CheckContext, settings: Settings
) -> tuple[Finding, ...]:
    """The findings, each of the first errors with the smallest changes that were tried and cured it."""
    assert plan.rules is not None
    subject = Subject(source.model, plan.rules, context)
    errors = [f for f in findings if f.severity is Severity.ERROR and f.suppressed is None][:TRIED]
    before = _errors(findings)
    cured = {id(f): _cures(f, before, subject, source, plan, settings) for f in errors}
    return tuple(replace(f, tried=cured[id(f)]) if id(f) in cured else f for f in findings)


def _errors(findings: Sequence[Finding]) -> Errors:
    return frozenset((f.code, f.site) for f in findings if f.severity is Severity.ERROR)


def _cures(
    finding: Finding,
    before: Errors,
    subject: Subject,
    source: ModelSource,
    plan: Plan,
    settings: Settings,
) -> tuple[Trial, ...]:
    found: list[Trial] = []
    for index, proposal in enumerate(proposals(subject, finding)):
        if len(found) == KEPT:
            break
        if any(trial.kind == proposal.kind for trial in found):
            continue
        settings.told(f"trying a cure for {finding.site}", index, index + 1)
        after = _run(proposal, source, plan, settings)
        if after is None:
            continue
        left = _errors(run_checks(after, ALL_CHECKS))
        gone = not any(site == finding.site for _, site in left)
        if gone and {site for _, site in left} <= {site for _, site in before}:
            texts = _text(subject.context, finding, before), _text(after, finding, left)
            found.append(Trial(proposal.kind, proposal.change, proposal.paste, *texts))
    return tuple(found)


def _run(proposal: Proposal, source: ModelSource, plan: Plan, settings: Settings) -> CheckContext | None:
    """The audit under a change; nothing if it cannot be traced or run, or makes another function of it."""
    form = lower_format(proposal.dtype) if proposal.dtype else plan.number_format
    changed = replace(
        plan, number_format=form, rules=proposal.rules or plan.rules, edits=proposal.edits, min_sqnr=None
    )
    model = proposal.model or source.model
    try:
        if proposal.model is not None and not _same_function(source, proposal):
            return None
        (audit,) = run_audits(model, source.batches, [changed], settings.told)
    except AuditError:
        return None
    return context_of(audit, form, replace(settings, prove=False, static=False))


def _same_function(source: ModelSource, proposal: Proposal) -> bool:
    """Whether both models give the same FP32 results, bit for bit, on the first batch."""
    assert proposal.model is not None
    batch = source.batches[0]
    models = (source.model, proposal.model)
    made = [call_unchanged(model, batch.args, batch.kwargs, seed=0) for model in models]
    pairs = zip(*map(torch.utils._pytree.tree_leaves, made), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


def _text(context: CheckContext, finding: Finding, errors: Errors) -> str:
    """One line about a run: the site, the outputs, and how many errors there are."""
    site, seen = context.site.get(finding.site), context.observed(finding.site)
    where = str(site.dtype).removeprefix("torch.") if site is not None else "gone"
    values = f"{finding.site} in {where}" if site is not None else f"{finding.site} is gone"
    if seen.elements:
        values += f", peak {number(seen.ref_peak)}" + (f", {seen.bad} inf or NaN" if seen.bad else "")
    accuracies = [db for _, _, db in context.outputs if db is not None]
    output = f"outputs {min(accuracies):.0f} dB" if accuracies else "outputs exact"
    broken = context.record.origins and any(o.fate == "reaches the output" for o in context.record.origins)
    output = "outputs broken" if broken else output
    return f"{values}; {output}; {len(errors)} error{'s' if len(errors) != 1 else ''}"
