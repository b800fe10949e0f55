"""``scan --advise``: tries each proposed change and keeps those that work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ampaudit.audit.advice import AdviceContext, Proposal, diff_of, proposals
from ampaudit.audit.advice.attempts import Attempt, Attempts, decibels, errors_of, outputs_text
from ampaudit.audit.advice.combined import combined_policy
from ampaudit.audit.advice.interface import Exemption
from ampaudit.audit.advice.limits import LimitedStreams
from ampaudit.audit.advice.pytorch import code_of_dtype, with_code
from ampaudit.audit.checks import CheckContext, Finding
from ampaudit.audit.checks.model_code import refused_sites
from ampaudit.audit.checks.suppress import Suppression
from ampaudit.audit.config import ScanConfig
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number
from ampaudit.report.finding import CombinedPolicy, Trial
from ampaudit.run.audit import RunConfig
from ampaudit.source import ModelSource
from ampaudit.trace.values import dtype_name

__all__ = ["advised"]

TRIED = 8  # errors; each costs a run or two
SHOWN = 2  # changes per error: the smallest, and one of another kind
ALIKE_DB = 3.0  # rounding alone makes alternatives differ by less
EXACT_DB = 80.0  # no 16-bit format shows more
UNNAMED = ("AMP101", "AMP103")  # whose advice is general: no cause is known
NOT_RUN = "the model cannot be run so"


def advised(
    findings: Sequence[Finding],
    source: ModelSource,
    plan: RunConfig,
    context: CheckContext,
    settings: ScanConfig,
    hiding: Sequence[Suppression] = (),
) -> tuple[tuple[Finding, ...], CombinedPolicy | None]:
    """Return the findings with the smallest changes that remove each of the first errors, and one for all.

    An error that no change removes has the changes that were tried.
    """
    assert plan.rules is not None
    errors = errors_of(findings)
    if not errors:
        return tuple(findings), None
    subject = AdviceContext(source.model, plan.rules, context)
    attempts = Attempts(subject, source, plan, settings, refused_sites(context), tuple(hiding))
    advisor = _Advisor(attempts, frozenset(f.site for f in errors), len(errors), LimitedStreams(attempts))
    tried: dict[int, tuple[Trial, ...]] = {}
    for number, finding in enumerate(errors[:TRIED]):
        settings.on_progress(f"trying changes for {finding.site}", number, min(len(errors), TRIED))
        tried[id(finding)] = advisor.trials(finding)
    form = context.number_format.name
    annotated = tuple(_with_trials(f, tried[id(f)], form) if id(f) in tried else f for f in findings)
    return annotated, combined_policy(attempts, findings, advisor.exemptions)


def _with_trials(finding: Finding, tried: tuple[Trial, ...], form: str) -> Finding:
    """Add the trials to a finding; if none helps, they refute its general advice, which is replaced."""
    result = replace(finding, tried=tried)
    if not result.unhelped or result.code not in UNNAMED:
        return result
    advice = f"nothing that was tried helps: change the code so that its values stay within {form}"
    return replace(result, advice=advice)


@dataclass(frozen=True, slots=True)
class _Advisor:
    """Tries changes for one finding after the other.

    Attributes:
        attempts: Runs the model under changes.
        before: Sites of the errors without a change.
        errors: Number of errors without a change.
        limited: Streams that a limit acts on.
        exemptions: Exemption that removes a finding, by the finding's site.
        rescales: Attempts to rescale weights, by code: one that fixes a stream fixes all errors on it.
    """

    attempts: Attempts
    before: frozenset[SiteId]
    errors: int
    limited: LimitedStreams
    exemptions: dict[SiteId, Exemption] = field(default_factory=dict)
    rescales: dict[str, Attempt | None] = field(default_factory=dict)

    def trials(self, finding: Finding) -> tuple[Trial, ...]:
        """Return the smallest change that removes a finding, and one of another kind; cures come first.

        If no change removes it, return those that were tried.
        """
        successes: list[Trial] = []
        failed: list[Trial] = []
        for alternatives in proposals(self.attempts.subject, finding):
            if sum(trial.outcome == "cure" for trial in successes) == SHOWN:
                break
            if any(trial.kind == alternatives[0].kind for trial in successes):
                continue
            tried = [(self._try(p, finding), p) for p in alternatives]
            failed += (trial for trial, _ in tried if trial.outcome == "failed")
            best = _best([trial for trial, _ in tried if trial.outcome != "failed"])
            if best is not None:
                proposal = next(p for trial, p in tried if trial is best)
                self.exemptions.update((finding.site, exemption) for exemption in proposal.exemptions)
                successes.append(replace(best, code=self._code(proposal, finding, best)))
        # cures first, and of fixes rules, which combine
        if all(trial.kind != "rescale" for trial in successes):
            limited = self.limited.trial(finding, self.before)
            successes[:0] = [limited] if limited is not None else []
        successes.sort(key=lambda t: 0 if t.outcome == "cure" else 1 + (t.kind == "rescale"))
        return tuple(successes[:SHOWN] or failed)

    def _try(self, proposal: Proposal, finding: Finding) -> Trial:
        """Try a change; it fails unless it removes the finding and preserves the model's function."""
        attempt = self._attempt(proposal)
        before, settings = self.attempts.subject.context, self.attempts.settings
        summary = _text(before, finding, self.errors)
        trial = Trial(proposal.kind, proposal.change, proposal.paste, summary, NOT_RUN, "failed")
        if attempt is None:
            return trial
        sites = {f.site for f in attempt.errors}
        helps = attempt.keeps and finding.site not in sites and sites <= self.before
        remaining = len(attempt.errors)
        return replace(
            trial,
            after=_text(attempt.context, finding, remaining),
            outcome=("fix" if remaining else "cure") if helps else "failed",
            left=remaining,
            before_db=decibels(before),
            after_db=decibels(attempt.context),
            diff=diff_of(proposal) if settings.diff and not self.attempts.source.names_files else "",
        )

    def _attempt(self, proposal: Proposal) -> Attempt | None:
        if proposal.kind != "rescale":
            return self.attempts.run(proposal)
        if proposal.paste not in self.rescales:
            self.rescales[proposal.paste] = self.attempts.run(proposal)
        return self.rescales[proposal.paste]

    def _code(self, proposal: Proposal, finding: Finding, trial: Trial) -> str:
        """Return a change as PyTorch code; empty if the code helps less than the change."""
        subject = self.attempts.subject
        candidate = with_code(subject, proposal.exemptions) if proposal.exemptions else None
        if proposal.dtype is not None:
            candidate = code_of_dtype(subject, proposal.dtype)
        if candidate is None:
            return ""
        code, same = candidate
        if same.rules is subject.rules and same.model is None:
            return code  # it is the change that was tried
        retrial = self._try(same, finding)
        return code if retrial.outcome != "failed" and _best((retrial, trial)) is retrial else ""


def _best(tried: Sequence[Trial]) -> Trial | None:
    """Return the first of the most accurate alternatives; cures before fixes."""
    cures = [trial for trial in tried if trial.outcome == "cure"] or list(tried)
    accuracies = [EXACT_DB if trial.after_db is None else min(trial.after_db, EXACT_DB) for trial in cures]
    enough = max(accuracies, default=0.0) - ALIKE_DB
    return next((trial for trial, db in zip(cures, accuracies, strict=True) if db >= enough), None)


def _text(context: CheckContext, finding: Finding, errors: int) -> str:
    """Summarize a run in one line: the site, the outputs against the FP32 model, and the number of errors."""
    site, stats = context.site.get(finding.site), context.observed(finding.site)
    values = f"{finding.site} {f'in {dtype_name(site.dtype)}' if site is not None else 'is gone'}"
    if stats.elements:
        values += f", peak {format_number(stats.ref_peak)}"
        values += f", {stats.bad} inf or NaN" if stats.bad else ""
    return f"{values}; {outputs_text(context, errors)}"
