"""Proposes rules that keep a site, or the few sites that share its large value, in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set

import torch
from torch import fx

from ampaudit.audit.advice.interface import AdviceContext, Proposal
from ampaudit.audit.checks.interface import some_sites
from ampaudit.core.sites import SiteId
from ampaudit.policy import RuleSet
from ampaudit.policy.schema import Cast, KeepFp32, Match, Reason, Rule
from ampaudit.report.finding import Finding
from ampaudit.report.pages import page_of
from ampaudit.trace import Role, Site
from ampaudit.trace.flow import Flow
from ampaudit.trace.functional import overload_of
from ampaudit.trace.opnames import base_name
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["keep_in_float32"]

BACK = (1, 2, 4, 8)  # steps
_PROMOTING = ("cat", "concat", "stack", "where")
_SOURCE = "ampaudit scan --advise"


def keep_in_float32(subject: AdviceContext, finding: Finding) -> Iterator[Proposal]:
    """Propose to keep one site, then the site and all readers of its out-of-range value."""
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
    yield _keep(subject, {s.id: s for s in first}, why)
    if finding.kind != "overflow":
        yield from _back(subject, first, why)
    island = _island(subject, first)
    if len(island) > len(first):
        yield _keep(subject, island, why)


def _back(subject: AdviceContext, first: Sequence[Site], why: str) -> Iterator[Proposal]:
    """Go back from the site in growing steps, since the rounding began at one of its inputs."""
    kept = {site.id: site for site in first}
    frontier = list(first)
    for back in range(1, BACK[-1] + 1):
        made = [m for step in frontier for m in subject.context.flow.makers(step)]
        frontier = [m for m in made if m.id not in kept and m.facts is not None]
        kept |= {m.id: m for m in frontier}
        if back in BACK or not frontier:
            yield _keep(subject, kept, why)
        if not frontier:
            return


def _island(subject: AdviceContext, first: Sequence[Site]) -> dict[SiteId, Site]:
    """Add the readers of values above half of the format's limit, which must take them in float32.

    What only hands values on is not measured: its peak is that of what it reads.
    """
    context = subject.context
    island = {site.id: site for site in first}
    frontier = [(site, 0.0) for site in first]
    while frontier:
        site, handed = frontier.pop()
        seen = context.observed(site.id)
        peak = seen.ref_peak if seen.elements else handed
        if peak <= context.number_format.max / 2:
            continue
        found = [r for r in context.flow.readers(site) if r.id not in island and r.facts is not None]
        island |= {reader.id: reader for reader in found}
        frontier += [(reader, peak) for reader in found]
    return island


def _border(subject: AdviceContext, kept: Mapping[SiteId, Site]) -> list[SiteId]:
    """Return the first ops that reject float32 next to weights stored in 16 bits.

    Elementwise ops promote, so float32 flows on through them; a product or a norm with 16-bit weights takes
    what it reads in 16 bits again.
    """
    if subject.rules.file.weights.storage != "lower":
        return []
    flow, border = subject.context.flow, dict[SiteId, Site]()
    for graph in (traced.graph for traced in flow.every):
        wide: set[fx.Node] = set()
        for node in graph.nodes:
            site = flow.site(node)
            if site is not None and site.id in kept:
                wide.add(node)
            elif not wide.isdisjoint(node.all_input_nodes) and not _stays(flow, node, site, wide):
                if site is None or site.role is Role.VIEW or _promotes(node, wide):
                    wide.add(node)
                elif site.facts is not None:
                    border[site.id] = site
    return _in_order(subject, border)


def _stays(flow: Flow, node: fx.Node, site: Site | None, wide: Set[fx.Node]) -> bool:
    """Return whether an op keeps its dtype although one of its inputs is now float32."""
    if site is None:
        return False
    if site.role.converts or site.decision.cast is Cast.FLOAT32:
        return True
    return flow.writes(site) and node.args[0] not in wide


def _promotes(node: fx.Node, wide: Set[fx.Node]) -> bool:
    """Return whether an op accepts float32 next to its other inputs."""
    values = [other.meta.get("val") for other in node.all_input_nodes if other not in wide]
    narrow = any(isinstance(value, torch.Tensor) and value.dtype in LOW_PRECISION_DTYPES for value in values)
    op = overload_of(node.target)
    return not narrow or op is None or torch.Tag.pointwise in op.tags or base_name(op) in _PROMOTING


def _in_order(subject: AdviceContext, sites: Mapping[SiteId, Site]) -> list[SiteId]:
    return [site.id for site in subject.context.graph_sites if site.id in sites]


def _keep(subject: AdviceContext, kept: Mapping[SiteId, Site], why: str) -> Proposal:
    sites, border = _in_order(subject, kept), _border(subject, kept)
    rules = [_rule("keep", sites, Cast.FLOAT32, why), *_returning(border)]
    change = f"keep {some_sites(sites)} in float32"
    return Proposal("rule", change, "\n".join(map(_paste, rules)), rules=_with(subject.rules, rules))


def _returning(border: Sequence[SiteId]) -> list[Rule]:
    return [_rule("return", border, Cast.LOWER, "later ops run in 16 bits again")] if border else []


def _keep_weight(subject: AdviceContext, weight: str) -> Proposal:
    """Keep the ops that use a weight in float32, and the weight itself if it is stored in 16 bits."""
    why = f"{weight} is infinite in 16 bits"
    name = (_literal(weight),)
    rule = Rule(
        id=f"mine/keep-{weight}",
        match=Match(parameter=name),
        cast=Cast.FLOAT32,
        reason=Reason.RANGE,
        why=why,
        source=_SOURCE,
    )
    context = subject.context
    users = [s for s in context.graph_sites if weight in context.users.get(s.id, ())]
    island = _island(subject, users)
    others = _in_order(subject, {site: island[site] for site in island.keys() - {s.id for s in users}})
    rules = [rule, *([_rule("keep", others, Cast.FLOAT32, why)] if others else [])]
    rules += _returning(_border(subject, island))
    changed = _with(subject.rules, rules)
    paste = "\n".join(map(_paste, rules))
    weights = subject.rules.file.weights
    if weights.storage == "lower":
        weights = weights.model_copy(update={"keep": (*weights.keep, KeepFp32(parameter=name))})
        changed = RuleSet(
            changed.file.model_copy(update={"weights": weights}), changed.ops, changed.environment
        )
        # a file that says something of weights says all of it
        stored = json.dumps(weights.model_dump(mode="json", exclude_defaults=True))
        paste = f"weights: {stored}\nrules:\n{paste}"
    return Proposal("rule", f"keep {weight} in float32", paste, rules=changed)


def _rule(name: str, sites: Sequence[SiteId], cast: Cast, why: str) -> Rule:
    return Rule(
        id=f"mine/{name}-{sites[0]}",
        match=Match(site=tuple(map(_literal, sites))),
        cast=cast,
        reason=Reason.RANGE,
        why=why,
        source=_SOURCE,
    )


def _with(rules: RuleSet, more: Sequence[Rule]) -> RuleSet:
    """Return the policy with rules prepended, so that they take precedence."""
    file = rules.file.model_copy(update={"rules": (*more, *rules.file.rules)})
    return RuleSet(file, rules.ops, rules.environment)


def _literal(name: str) -> str:
    """Escape a name into a glob that matches only it."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def _paste(rule: Rule) -> str:
    """Format a rule as YAML, ready to paste into a file that extends the policy."""
    (key, values), *_ = rule.match.model_dump(exclude_defaults=True).items()
    lines = [
        f"id: {json.dumps(rule.id)}",
        f"match: {{{key}: {json.dumps(list(values))}}}",
        f"cast: {rule.cast}",
    ]
    lines += [f"reason: {rule.reason}", f"why: {json.dumps(rule.why)}", f"source: {rule.source}"]
    return "- " + "\n  ".join(lines)
