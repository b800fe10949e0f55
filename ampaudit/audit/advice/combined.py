"""Combines the float32 exemptions of several findings into one policy that fixes them all, with few ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from ampaudit.audit.advice.attempts import Attempt, Attempts, decibels, errors_of, outputs_text
from ampaudit.audit.advice.interface import Exemption, Proposal
from ampaudit.audit.advice.pytorch import with_code
from ampaudit.audit.advice.rules import exempt_sites, exemptions_for, propose_exemptions, quoted
from ampaudit.core.sites import SiteId
from ampaudit.core.text import plural
from ampaudit.report.finding import CombinedPolicy, Finding

__all__ = ["combined_policy"]

ROUNDS = 8  # as many alternatives as a finding has, and some for errors that appear only then
REDUCING = 16  # runs


def combined_policy(
    attempts: Attempts, findings: Sequence[Finding], sufficient: Mapping[SiteId, Exemption]
) -> CombinedPolicy | None:
    """Return one policy for all errors, or for some; ``None`` if no rule helps any of them.

    Args:
        attempts: Runs the model under changes.
        findings: Findings of the scan.
        sufficient: The exemption that removes a finding by itself, by the finding's site.
    """
    errors = errors_of(findings)
    search = _Search(attempts, len(errors), sufficient)
    candidate = search.best(errors)
    if candidate is None:
        return None
    members, proposal, attempt = candidate
    before, rules = attempts.subject.context, attempts.subject.rules
    sites = exempt_sites(attempts.subject, members)
    change = f"keep {plural(len(sites), 'op')} in float32"
    name = f"{rules.name[:55]}-advised"
    head = {"name": name, "title": f"{rules.name}, with {plural(len(sites), 'op')} in float32"}
    lines = [f"{key}: {quoted(value)}" for key, value in head.items()]
    listed = proposal.paste if proposal.paste.startswith("weights:") else f"rules:\n{proposal.paste}"
    return CombinedPolicy(
        change=change,
        name=name,
        extends=rules.location,
        text="\n".join((*lines, CombinedPolicy.frame(rules.location), listed, "")),
        code=search.code(members) if attempt.cures else "",
        before=outputs_text(before, len(errors)),
        after=outputs_text(attempt.context, len(attempt.errors)),
        outcome="cure" if attempt.cures else "fix",
        left=tuple(f"{f.code} at {f.site}" for f in attempt.errors),
        before_db=decibels(before),
        after_db=decibels(attempt.context),
    )


class _Candidate(NamedTuple):
    members: list[Exemption]
    proposal: Proposal
    attempt: Attempt


@dataclass(slots=True)
class _Search:
    attempts: Attempts
    errors: int
    sufficient: Mapping[SiteId, Exemption]
    runs: int = 0

    def best(self, errors: Sequence[Finding]) -> _Candidate | None:
        """Start with the smallest exemption of each error, and enlarge those that do not suffice."""
        alternatives: dict[SiteId, Iterator[Exemption]] = {}
        members: dict[SiteId, Exemption] = {}
        best: _Candidate | None = None
        failing: Sequence[Finding] = errors
        for _ in range(ROUNDS):
            # an error at a new site, such as a cast, is that of a site that was known before
            grown = self._enlarge(failing, alternatives, members)
            if not grown and not self._enlarge(errors, alternatives, members):
                break
            candidate = self._run(list(members.values()))
            if candidate is None:
                failing = errors
                continue
            attempt = candidate.attempt
            if attempt.cures:
                return self._reduce(candidate)
            fewest = self.errors if best is None else len(best.attempt.errors)
            if attempt.keeps and len(attempt.errors) < fewest:
                best = candidate
            failing = attempt.errors or errors
        return best

    def _enlarge(
        self,
        failing: Sequence[Finding],
        alternatives: dict[SiteId, Iterator[Exemption]],
        members: dict[SiteId, Exemption],
    ) -> bool:
        """Take the next alternative of each failing finding; return whether there was one."""
        grown = False
        for finding in failing:
            site, sufficient = finding.site, self.sufficient.get(finding.site)
            if site not in alternatives:
                # together with others the smallest may do; otherwise continue with the sufficient one
                every = list(exemptions_for(self.attempts.subject, finding))
                start = every.index(sufficient) if sufficient in every else 1
                alternatives[site] = iter(every[:1] + every[max(start, 1) :])
            for exemption in islice(alternatives[site], 1):
                members[site], grown = exemption, True
        return grown

    def _run(self, members: list[Exemption]) -> _Candidate | None:
        self.runs += 1
        self.attempts.settings.on_progress("combining the cures", self.runs - 1, self.runs)
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

    def code(self, members: Sequence[Exemption]) -> str:
        """Return PyTorch code that fixes everything as well; empty if there is none."""
        version = with_code(self.attempts.subject, members)
        if version is None:
            return ""
        attempt = self.attempts.run(version[1])
        return version[0] if attempt is not None and attempt.cures else ""
