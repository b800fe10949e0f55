"""Proposals that keep a site, or the few sites that share its large value, in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from ampaudit.advice.interface import Proposal, Subject
from ampaudit.checks.interface import some_sites
from ampaudit.pages import page_of
from ampaudit.policy import RuleSet
from ampaudit.policy.schema import Cast, KeepFp32, Match, Reason, Rule
from ampaudit.report.finding import Finding
from ampaudit.sites import SiteId
from ampaudit.trace import Role, Site

__all__ = ["keep_in_float32"]

BACK = (1, 2, 4, 8)  # steps
_SOURCE = "ampaudit scan --advise"


def keep_in_float32(subject: Subject, finding: Finding) -> Iterator[Proposal]:
    """One site alone; then with all that read its value while it is beyond the format."""
    context = subject.context
    weight = next((w for w in context.broken_weights if w.rpartition(".")[0] == finding.layer), None)
    if finding.phase == "weights" and weight is not None:
        yield _keep_weight(subject, weight)
        return
    site = context.site.get(finding.site)
    if site is None or site.id not in {s.id for s in context.graph_sites}:
        return
    start = context.flow.readers(site) if site.role.inserted else [site]
    first = [s for s in start if s.facts is not None]
    if not first:
        return
    why = f"{page_of(finding.code).title} ({finding.code})"
    yield _keep(subject, [s.id for s in first], [], why)
    if finding.kind != "overflow":
        yield from _back(subject, first, why)
    island, border = _island(subject, first)
    if len(island) > len(first) or border:
        yield _keep(subject, island, border, why)


def _back(subject: Subject, first: Sequence[Site], why: str) -> Iterator[Proposal]:
    """The site and what its input is made of, further back each time: rounding began somewhere there."""
    context = subject.context
    order = [s.id for s in context.graph_sites]
    kept = {site.id: site for site in first}
    frontier = list(first)
    for back in range(1, BACK[-1] + 1):
        made = [m for step in frontier for m in context.flow.makers(step)]
        frontier = [m for m in made if m.id not in kept and m.facts is not None]
        kept |= {m.id: m for m in frontier}
        if back in BACK or not frontier:
            yield _keep(subject, sorted(kept, key=order.index), _border(subject, kept, order), why)
        if not frontier:
            return


def _border(subject: Subject, kept: Mapping[SiteId, Site], order: Sequence[SiteId]) -> list[SiteId]:
    """Those that read a kept value, where weights are stored in 16 bits and they would meet float32."""
    if subject.rules.file.weights.storage != "lower":
        return []
    readers = {r.id for s in kept.values() for r in subject.context.flow.readers(s) if r.facts is not None}
    return sorted(readers - set(kept), key=order.index)


def _island(subject: Subject, first: Sequence[Site]) -> tuple[list[SiteId], list[SiteId]]:
    """Readers of a value beyond half of the format must take it in float32; those after them take 16 bits."""
    context = subject.context
    island = {site.id: site for site in first}
    border: dict[SiteId, Site] = {}
    frontier = list(first)
    while frontier:
        site = frontier.pop()
        large = context.observed(site.id).ref_peak > context.number_format.max / 2
        for reader in context.flow.readers(site):
            if reader.id in island or reader.facts is None:
                continue
            if large:
                island[reader.id] = reader
                border.pop(reader.id, None)
                frontier.append(reader)
            elif reader.role is Role.COMPUTE:
                border[reader.id] = reader
    stored = subject.rules.file.weights.storage == "lower"
    order = [s.id for s in context.graph_sites]
    ids = sorted(island, key=order.index)
    return ids, (sorted(set(border) - set(island), key=order.index) if stored else [])


def _keep(subject: Subject, sites: Sequence[SiteId], border: Sequence[SiteId], why: str) -> Proposal:
    rules = [_rule("keep", sites, Cast.FLOAT32, why)]
    if border:
        rules.append(_rule("return", border, Cast.NARROWEST, "what follows goes on in 16 bits"))
    change = f"keep {some_sites(sites)} in float32"
    return Proposal("rule", change, "\n".join(map(_paste, rules)), rules=_with(subject.rules, rules))


def _keep_weight(subject: Subject, weight: str) -> Proposal:
    rule = Rule(
        id="mine/keep-weight",
        match=Match(parameter=(_literal(weight),)),
        cast=Cast.FLOAT32,
        reason=Reason.RANGE,
        why=f"{weight} is infinite in 16 bits",
        source=_SOURCE,
    )
    changed = _with(subject.rules, [rule])
    paste = _paste(rule)
    if subject.rules.file.weights.storage == "lower":
        weights = subject.rules.file.weights
        kept = weights.model_copy(update={"keep": (*weights.keep, KeepFp32(parameter=(_literal(weight),)))})
        changed = RuleSet(changed.file.model_copy(update={"weights": kept}), changed.ops, changed.environment)
        paste += f"\nweights: {{keep: [{{parameter: [{json.dumps(_literal(weight))}]}}]}}"
    return Proposal("rule", f"keep {weight} in float32", paste, rules=changed)


def _rule(name: str, sites: Sequence[SiteId], cast: Cast, why: str) -> Rule:
    return Rule(
        id=f"mine/{name}",
        match=Match(site=tuple(map(_literal, sites))),
        cast=cast,
        reason=Reason.RANGE,
        why=why,
        source=_SOURCE,
    )


def _with(rules: RuleSet, more: Sequence[Rule]) -> RuleSet:
    """The policy with rules before its own, which therefore decide."""
    file = rules.file.model_copy(update={"rules": (*more, *rules.file.rules)})
    return RuleSet(file, rules.ops, rules.environment)


def _literal(name: str) -> str:
    """A name as a glob that matches only itself."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _paste(rule: Rule) -> str:
    """The rule as YAML, for the list of rules in a file that extends the policy."""
    (key, values), *_ = rule.match.model_dump(exclude_defaults=True).items()
    lines = [f"id: {rule.id}", f"match: {{{key}: {json.dumps(list(values))}}}", f"cast: {rule.cast}"]
    lines += [f"reason: {rule.reason}", f"why: {rule.why}", f"source: {rule.source}"]
    return "- " + "\n  ".join(lines)
