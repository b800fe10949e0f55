"""``scan --advise``: tries each proposed change and keeps those that work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ampaudit.audit.advice import AdviceContext, Proposal, diff_of, proposals
from ampaudit.audit.advice.attempts import Attempt, Attempts, decibels, errors_of, outputs_text
from ampaudit.audit.advice.combined import combined_policy
from ampaudit.audit.advice.interface import Kept
from ampaudit.audit.advice.limits import LimitedStreams
from ampaudit.audit.advice.pytorch import code_of_dtype, with_code
from ampaudit.audit.checks import CheckContext, Finding
from ampaudit.audit.checks.mixed_dtypes import refused_sites
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

    Where nothing helps, an error has the changes that were tried.
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
    shown = tuple(_with(f, tried[id(f)], form) if id(f) in tried else f for f in findings)
    return shown, combined_policy(attempts, findings, advisor.kept)


def _with(finding: Finding, tried: tuple[Trial, ...], form: str) -> Finding:
    """Add what was tried; where nothing helps, general advice gives way to what is left to do."""
    found = replace(finding, tried=tried)
    if not found.unhelped or found.code not in UNNAMED:
        return found
    return replace(
        found, advice=f"nothing that was tried helps: change the code so that its values stay within {form}"
    )


@dataclass(frozen=True, slots=True)
class _Advisor:
    """Tries changes for one finding after the other.

    Attributes:
        before: the sites of the errors without any change.
        errors: how many there are.
        limited: streams that a limit acts on.
        kept: by the site of a finding, what a rule keeps to remove it.
        attempted: rescaled weights that were tried: those of one stream cure all errors on it.
    """

    attempts: Attempts
    before: frozenset[SiteId]
    errors: int
    limited: LimitedStreams
    kept: dict[SiteId, Kept] = field(default_factory=dict)
    attempted: dict[str, Attempt | None] = field(default_factory=dict)

    def trials(self, finding: Finding) -> tuple[Trial, ...]:
        """Return the smallest change that removes a finding, and one of another kind; cures come first.

        If none does, return those that were tried.
        """
        found: list[Trial] = []
        failed: list[Trial] = []
        for alternatives in proposals(self.attempts.subject, finding):
            if sum(trial.outcome == "cure" for trial in found) == SHOWN:
                break
            if any(trial.kind == alternatives[0].kind for trial in found):
                continue
            tried = [(self._tried(p, finding), p) for p in alternatives]
            failed += (trial for trial, _ in tried if trial.outcome == "failed")
            best = _best([trial for trial, _ in tried if trial.outcome != "failed"])
            if best is not None:
                proposal = next(p for trial, p in tried if trial is best)
                self.kept.update((finding.site, kept) for kept in proposal.kept)
                found.append(replace(best, code=self._code(proposal, finding, best)))
        # cures first, and of fixes rules, which combine
        if all(trial.kind != "rescale" for trial in found):
            limited = self.limited.trial(finding, self.before)
            found[:0] = [limited] if limited is not None else []
        found.sort(key=lambda t: 0 if t.outcome == "cure" else 1 + (t.kind == "rescale"))
        return tuple(found[:SHOWN] or failed)

    def _tried(self, proposal: Proposal, finding: Finding) -> Trial:
        """Try a change; it fails unless it removes the finding and keeps the user's function."""
        attempt = self._attempt(proposal)
        before, settings = self.attempts.subject.context, self.attempts.settings
        begun = _text(before, finding, self.errors)
        trial = Trial(proposal.kind, proposal.change, proposal.paste, begun, NOT_RUN, "failed")
        if attempt is None:
            return trial
        sites = {f.site for f in attempt.left}
        helps = attempt.keeps and finding.site not in sites and sites <= self.before
        left = len(attempt.left)
        return replace(
            trial,
            after=_text(attempt.context, finding, left),
            outcome=("fix" if left else "cure") if helps else "failed",
            left=left,
            before_db=decibels(before),
            after_db=decibels(attempt.context),
            diff=diff_of(proposal) if settings.diff and not self.attempts.source.names_files else "",
        )

    def _attempt(self, proposal: Proposal) -> Attempt | None:
        if proposal.kind != "rescale":
            return self.attempts.run(proposal)
        if proposal.paste not in self.attempted:
            self.attempted[proposal.paste] = self.attempts.run(proposal)
        return self.attempted[proposal.paste]

    def _code(self, proposal: Proposal, finding: Finding, trial: Trial) -> str:
        """Return a change as PyTorch code; empty where the code does less than the change."""
        subject = self.attempts.subject
        written = with_code(subject, proposal.kept) if proposal.kept else None
        if proposal.dtype is not None:
            written = code_of_dtype(subject, proposal.dtype)
        if written is None:
            return ""
        code, same = written
        if same.rules is subject.rules and same.model is None:
            return code  # it is the change that was tried
        done = self._tried(same, finding)
        return code if done.outcome != "failed" and _best((done, trial)) is done else ""


def _best(tried: Sequence[Trial]) -> Trial | None:
    """Return the first of the most accurate alternatives; cures before fixes."""
    cures = [trial for trial in tried if trial.outcome == "cure"] or list(tried)
    found = [EXACT_DB if trial.after_db is None else min(trial.after_db, EXACT_DB) for trial in cures]
    return next((t for t, db in zip(cures, found, strict=True) if db >= max(found) - ALIKE_DB), None)


def _text(context: CheckContext, finding: Finding, errors: int) -> str:
    """Summarize a run in one line: the site, the outputs against the FP32 model, and the number of errors."""
    site, seen = context.site.get(finding.site), context.observed(finding.site)
    where = dtype_name(site.dtype) if site is not None else "gone"
    values = f"{finding.site} in {where}" if site is not None else f"{finding.site} is gone"
    if seen.elements:
        values += f", peak {format_number(seen.ref_peak)}" + (f", {seen.bad} inf or NaN" if seen.bad else "")
    return f"{values}; {outputs_text(context, errors)}"
