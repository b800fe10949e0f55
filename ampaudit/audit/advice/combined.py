"""Combines what findings need in float32 into one policy that cures them all, as few ops as runs show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ampaudit.audit.advice.attempts import Attempt, Attempts, decibels, errors_of, outputs_text
from ampaudit.audit.advice.interface import Kept, Proposal
from ampaudit.audit.advice.pytorch import with_code
from ampaudit.audit.advice.rules import kept_sites, proposal_keeping, quoted, to_keep
from ampaudit.core.sites import SiteId
from ampaudit.core.text import plural
from ampaudit.report.finding import CombinedPolicy, Finding

__all__ = ["combined_policy"]

ROUNDS = 8  # as many alternatives as a finding has, and some for errors that appear only then
REDUCING = 16  # runs


def combined_policy(
    attempts: Attempts, findings: Sequence[Finding], known: Mapping[SiteId, Kept]
) -> CombinedPolicy | None:
    """Return one policy for all errors, or for some; ``None`` if no rule helps any of them.

    Args:
        attempts: runs the model.
        findings: of the scan.
        known: by the site of a finding, what is enough for that one alone.
    """
    errors = errors_of(findings)
    search = _Search(attempts, len(errors), known)
    found = search.found(errors)
    if found is None:
        return None
    members, proposal, attempt = found
    before, rules = attempts.subject.context, attempts.subject.rules
    sites = kept_sites(attempts.subject, members)
    left = tuple(f"{f.code} at {f.site}" for f in attempt.left)
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
        after=outputs_text(attempt.context, len(attempt.left)),
        outcome="cure" if attempt.cures else "fix",
        left=left,
        before_db=decibels(before),
        after_db=decibels(attempt.context),
    )


Found = tuple[list[Kept], Proposal, Attempt]


@dataclass(slots=True)
class _Search:
    attempts: Attempts
    errors: int
    known: Mapping[SiteId, Kept]
    runs: int = field(default=0)

    def found(self, errors: Sequence[Finding]) -> Found | None:
        """Keep the least for each error; where that does not do, the next larger thing."""
        waiting: dict[SiteId, Iterator[Kept]] = {}
        chosen: dict[SiteId, Kept] = {}
        best: Found | None = None
        failing: Sequence[Finding] = errors
        for _ in range(ROUNDS):
            # an error at a new site, such as a cast, is that of a site that was known before
            grown = self._enlarged(failing, waiting, chosen)
            if not grown and not self._enlarged(errors, waiting, chosen):
                break
            found = self._tried(list(chosen.values()))
            if found is None:
                failing = errors
                continue
            if found[2].cures:
                return self._reduced(found)
            left = len(found[2].left)
            if found[2].keeps and left < (self.errors if best is None else len(best[2].left)):
                best = found
            failing = found[2].left or errors
        return best

    def _enlarged(
        self, failing: Sequence[Finding], waiting: dict[SiteId, Iterator[Kept]], chosen: dict[SiteId, Kept]
    ) -> bool:
        """Take the next alternative of each failing finding; return whether there was one."""
        grown = False
        for finding in failing:
            site, known = finding.site, self.known.get(finding.site)
            if site not in waiting:
                # with the others, the least may do; else what is enough for this one alone
                alternatives = list(to_keep(self.attempts.subject, finding))
                enough = alternatives.index(known) if known in alternatives else 1
                waiting[site] = iter(alternatives[:1] + alternatives[max(enough, 1) :])
            for kept in islice(waiting[site], 1):
                chosen[site], grown = kept, True
        return grown

    def _tried(self, members: list[Kept]) -> Found | None:
        self.runs += 1
        self.attempts.settings.on_progress("combining the cures", self.runs - 1, self.runs)
        proposal = proposal_keeping(self.attempts.subject, members)
        attempt = self.attempts.run(proposal)
        return (members, proposal, attempt) if attempt is not None else None

    def _reduced(self, found: Found) -> Found:
        """Drop members that are needless: all ops of a kind, then halves; the budget bounds the search."""
        kinds: dict[str, list[Kept]] = {}
        for kept in found[0]:
            kind = kept.weight or kept.sites[0].rpartition("/")[2].partition("#")[0]
            kinds.setdefault(kind, []).append(kept)
        pending, limit = list(kinds.values()), self.runs + REDUCING
        while pending and self.runs < limit:
            dropped = pending.pop()
            rest = [kept for kept in found[0] if kept not in dropped]
            tried = self._tried(rest) if rest else None
            if tried is not None and tried[2].cures:
                found = tried
            elif len(dropped) > 1:
                half = len(dropped) // 2
                pending += [dropped[:half], dropped[half:]]
        return found

    def code(self, members: Sequence[Kept]) -> str:
        """Return PyTorch code that cures as well; empty where there is none."""
        written = with_code(self.attempts.subject, members)
        attempt = self.attempts.run(written[1]) if written is not None else None
        return written[0] if written is not None and attempt is not None and attempt.cures else ""
