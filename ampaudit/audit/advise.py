"""``scan --advise``: tries each proposed change and keeps those that work.

If clamps limit a residual stream to the range of float16, they act in FP32 as well. A wider format would not
need them, so the reference for such a stream is FP32 without the clamps: against it, the error of the clamps
is compared with that of the rescaled stream in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import torch

from ampaudit.audit.advice import AdviceContext, diff_of, proposals
from ampaudit.audit.advice.attempts import Attempt, Attempts, decibels, errors_of, outputs_text, worst_db
from ampaudit.audit.advice.interface import Exemption, Proposal
from ampaudit.audit.advice.pytorch import code_of_dtype, with_code
from ampaudit.audit.advice.residual import ResidualRescale, residual_rescale
from ampaudit.audit.advice.residual_stream import Refusal, find_stream
from ampaudit.audit.advice.rules import exempt_sites, exemptions_for, propose_exemptions, quoted
from ampaudit.audit.checks import CheckContext
from ampaudit.audit.checks.range import limited_peak
from ampaudit.audit.checks.suppress import Suppression
from ampaudit.core.session import Progress
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number, plural
from ampaudit.findings.finding import CombinedPolicy, Finding, Trial
from ampaudit.run.config import RunConfig
from ampaudit.run.lockstep import Pair
from ampaudit.source import ModelSource
from ampaudit.trace import Site
from ampaudit.trace.op_calls import bypass
from ampaudit.trace.values import dtype_name

ROUNDS = 8  # as many alternatives as a finding has, and some for errors that appear only then
REDUCING = 16  # runs
Outputs = list[dict[str, Pair]]
MAX_TRIED = 8  # errors; each costs a run or two
MAX_SHOWN = 2  # changes per error: the smallest, and one of another kind
ALIKE_DB = 3.0  # rounding alone makes alternatives differ by less
EXACT_DB = 80.0  # no 16-bit format shows more
UNNAMED = ("AMP101", "AMP103")  # codes of an unknown cause, whose advice is general
NOT_RUN = "the model cannot be run this way"


def _same(first: Outputs, second: Outputs) -> bool:
    """Return whether both runs have bitwise equal FP32 outputs."""
    pairs = [(a[name][0], b[name][0]) for a, b in zip(first, second, strict=True) for name in a]
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


def _trial(
    change: ResidualRescale,
    context: CheckContext,
    without: CheckContext,
    attempt: Attempt,
    limits: Sequence[Site],
) -> Trial:
    """Return the trial of a rescaled stream, which compares its error with that of the limits."""
    errors, cost = len(attempt.errors), worst_db(without.record.edited)
    producers = (context.flow.producers(each)[0] for each in limits)
    peak = max(without.observed(producer.id).ref_peak for producer in producers)
    limit = context.observed(limits[0].id).ref_peak
    where = f"{limits[0].id}{f' and {len(limits) - 1} more' if len(limits) > 1 else ''}"
    return Trial(
        "rescale",
        f"{change.change}, without the clamping by {where}",
        change.paste,
        f"{where} clamped {format_number(peak)} to {format_number(limit)} in FP32 as well, "
        f"{cost:.0f} dB against FP32 without it",
        f"nothing is clamped; against FP32 without it, {outputs_text(attempt.context, errors)}",
        outcome="fix" if errors else "cure",
        left=errors,
        before_db=round(cost, 2),
        after_db=decibels(attempt.context),
    )


def add_advice(
    findings: Sequence[Finding],
    source: ModelSource,
    run_config: RunConfig,
    context: CheckContext,
    hiding: Sequence[Suppression],
    on_progress: Progress,
) -> tuple[tuple[Finding, ...], CombinedPolicy | None]:
    """Return the findings with the smallest changes that remove each of the first errors, and one for all.

    An error that no change removes has the changes that were tried.
    """
    assert run_config.rules is not None
    errors = errors_of(findings)
    if not errors:
        return tuple(findings), None
    subject = AdviceContext(source.model, run_config.rules, context)
    attempts = Attempts(subject, source, run_config, context.config, tuple(hiding), on_progress)
    advisor = _Advisor(attempts, frozenset(f.site for f in errors), len(errors))
    later = f"(not tried by itself; --advise tries the first {MAX_TRIED} errors)"
    annotated = {id(f): replace(f, advice=f"{f.advice} {later}") for f in errors[MAX_TRIED:]}
    form = context.number_format.name
    for number, finding in enumerate(errors[:MAX_TRIED]):
        on_progress(f"trying changes for {finding.site}", number, min(len(errors), MAX_TRIED))
        result = replace(finding, tried=advisor.trials(finding))
        if result.all_trials_failed and result.code in UNNAMED:  # the trials refute its general advice
            advice = f"nothing that was tried helps: change the code so that its values stay within {form}"
            result = replace(result, advice=advice)
        annotated[id(finding)] = result
    combined = _Search(attempts, errors, advisor.exemptions).policy()
    return tuple(annotated.get(id(f), f) for f in findings), combined


@dataclass(frozen=True, slots=True)
class _Advisor:
    """Tries changes for one finding after the other."""

    attempts: Attempts
    before: frozenset[SiteId]  # sites of the errors without a change
    errors: int  # number of errors without a change
    # exemption that removes a finding, by the finding's site
    exemptions: dict[SiteId, Exemption] = field(default_factory=dict)
    # attempts to rescale weights, by code: one that fixes a stream fixes all errors on it
    rescales: dict[str, Attempt | None] = field(default_factory=dict)
    # for the weights of each stream that a limit acts on, the trial to rescale it, and the sites of the
    # errors that remain
    streams: dict[frozenset[str], tuple[Trial, frozenset[SiteId]] | None] = field(default_factory=dict)

    def trials(self, finding: Finding) -> tuple[Trial, ...]:
        """Return the smallest change that removes a finding, and one of another kind; cures come first.

        If no change removes it, return those that were tried.
        """
        successes: list[Trial] = []
        failed: list[Trial] = []
        for alternatives in proposals(self.attempts.subject, finding):
            if sum(trial.outcome == "cure" for trial in successes) == MAX_SHOWN:
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
            limited = self._without_limits(finding)
            successes[:0] = [limited] if limited is not None else []
        successes.sort(key=lambda t: 0 if t.outcome == "cure" else 1 + (t.kind == "rescale"))
        return tuple(successes[:MAX_SHOWN] or failed)

    def _without_limits(self, finding: Finding) -> Trial | None:
        """Return the trial of a rescaled stream with limits, if it removes the finding and adds none."""
        context = self.attempts.subject.context
        site = context.site.get(finding.site)
        if site is None or site not in context.graph_sites:
            return None
        try:
            stream = find_stream(context.flow, site, context.number_format.max)
        except Refusal:
            return None
        clamps = map(context.flow.site, stream.clamps)
        acting = [each for each in clamps if each is not None and limited_peak(context, each) is not None]
        if not acting:
            return None
        key = frozenset(stream.weights)
        if key not in self.streams:
            self.streams[key] = self._rescaled(site, acting)
        result = self.streams[key]
        return result[0] if result is not None and finding.site not in result[1] <= self.before else None

    def _rescaled(self, site: Site, limits: Sequence[Site]) -> tuple[Trial, frozenset[SiteId]] | None:
        subject, unlimited, rescaled = self.attempts.subject, Outputs(), Outputs()
        edits = {each.id: bypass for each in limits}
        without = self.attempts.audit(Proposal("rewrite", "", "", edits=edits), unlimited)
        if without is None:
            return None
        peaks = {each.id: without.observed(each.id).ref_peak for each in without.graph_sites}
        form = subject.context.number_format
        try:
            change = residual_rescale(subject.model, subject.context.flow, site, peaks, form)
        except Refusal:
            return None
        proposal = Proposal("rescale", change.change, change.paste, model=change.applied(subject.model))
        after = self.attempts.audit(proposal, rescaled)
        if after is None or not change.is_in(subject.context.flow, after.flow):
            return None
        attempt = self.attempts.judge(after) if _same(unlimited, rescaled) else None
        if attempt is None or not attempt.keeps:
            return None
        failing = frozenset(finding.site for finding in attempt.errors)
        return _trial(change, subject.context, without, attempt, limits), failing

    def _try(self, proposal: Proposal, finding: Finding) -> Trial:
        """Try a change; it fails unless it removes the finding and preserves the model's function."""
        attempt = self._attempt(proposal)
        before, config = self.attempts.subject.context, self.attempts.config
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
            diff=diff_of(proposal) if config.diff and not self.attempts.source.names_files else "",
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


class _Candidate(NamedTuple):
    members: list[Exemption]
    proposal: Proposal
    attempt: Attempt


@dataclass(slots=True)
class _Search:
    """Searches one policy for several errors; exemptions are by the site of their error."""

    attempts: Attempts
    errors: Sequence[Finding]
    sufficient: Mapping[SiteId, Exemption]  # each removes its error by itself
    alternatives: dict[SiteId, Iterator[Exemption]] = field(default_factory=dict)  # not tried yet
    members: dict[SiteId, Exemption] = field(default_factory=dict)
    runs: int = 0

    def policy(self) -> CombinedPolicy | None:
        """Return one policy for all errors, or for some; ``None`` if no rule helps any of them."""
        candidate = self._best()
        if candidate is None:
            return None
        members, proposal, attempt = candidate
        subject, code = self.attempts.subject, ""
        version = with_code(subject, members) if attempt.cures else None
        if version is not None and (again := self.attempts.run(version[1])) is not None and again.cures:
            code = version[0]
        rules, ops = subject.rules, plural(len(exempt_sites(subject, members)), "op")
        name = f"{rules.name[:55]}-advised"
        lines = [f"name: {quoted(name)}", f"title: {quoted(f'{rules.name}, with {ops} in float32')}"]
        listed = proposal.paste if proposal.paste.startswith("weights:") else f"rules:\n{proposal.paste}"
        return CombinedPolicy(
            change=f"keep {ops} in float32",
            name=name,
            extends=rules.location,
            text="\n".join((*lines, CombinedPolicy.frame(rules.location), listed, "")),
            code=code,
            before=outputs_text(subject.context, len(self.errors)),
            after=outputs_text(attempt.context, len(attempt.errors)),
            outcome="cure" if attempt.cures else "fix",
            left=tuple(f"{f.code} at {f.site}" for f in attempt.errors),
            before_db=decibels(subject.context),
            after_db=decibels(attempt.context),
        )

    def _best(self) -> _Candidate | None:
        """Start with the smallest exemption of each error, and enlarge those that do not suffice."""
        best: _Candidate | None = None
        failing = self.errors
        for _ in range(ROUNDS):
            # an error at a new site, such as a cast, is that of a site that was known before
            if not self._enlarge(failing) and not self._enlarge(self.errors):
                break
            candidate = self._run(list(self.members.values()))
            if candidate is None:
                failing = self.errors
                continue
            attempt = candidate.attempt
            if attempt.cures:
                return self._reduce(candidate)
            fewest = len(self.errors if best is None else best.attempt.errors)
            if attempt.keeps and len(attempt.errors) < fewest:
                best = candidate
            failing = attempt.errors or self.errors
        return best

    def _enlarge(self, failing: Sequence[Finding]) -> bool:
        """Take the next alternative of each failing finding; return whether there was one."""
        grown = False
        for finding in failing:
            site, sufficient = finding.site, self.sufficient.get(finding.site)
            if site not in self.alternatives:
                # together with others the smallest may do; otherwise continue with the sufficient one
                every = list(exemptions_for(self.attempts.subject, finding))
                start = every.index(sufficient) if sufficient in every else 1
                self.alternatives[site] = iter(every[:1] + every[max(start, 1) :])
            for exemption in islice(self.alternatives[site], 1):
                self.members[site], grown = exemption, True
        return grown

    def _run(self, members: list[Exemption]) -> _Candidate | None:
        self.runs += 1
        self.attempts.on_progress("combining the cures", self.runs - 1, self.runs)
        proposal = propose_exemptions(self.attempts.subject, members)
        attempt = self.attempts.run(proposal)
        return _Candidate(members, proposal, attempt) if attempt is not None else None

    def _reduce(self, candidate: _Candidate) -> _Candidate:
        """Drop members that are not needed: all ops of a kind, then halves, within a budget of runs."""
        kinds: dict[str, list[Exemption]] = {}
        for exemption in candidate.members:
            kind = exemption.weight or exemption.sites[0].rpartition("/")[2].partition("#")[0]
            kinds.setdefault(kind, []).append(exemption)
        pending, limit = list(kinds.values()), self.runs + REDUCING
        while pending and self.runs < limit:
            dropped = pending.pop()
            rest = [exemption for exemption in candidate.members if exemption not in dropped]
            smaller = self._run(rest) if rest else None
            if smaller is not None and smaller.attempt.cures:
                candidate = smaller
            elif len(dropped) > 1:
                half = len(dropped) // 2
                pending += [dropped[:half], dropped[half:]]
        return candidate
