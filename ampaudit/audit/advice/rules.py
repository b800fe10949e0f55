"""Proposes rules that keep a site, or the few sites that share its large value, in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set

import torch
from torch import fx

from ampaudit.audit.advice.interface import AdviceContext, Exemption, Proposal
from ampaudit.core.sites import SiteId
from ampaudit.core.text import listed
from ampaudit.findings.finding import Finding
from ampaudit.findings.pages import page_of
from ampaudit.policy import RuleSet
from ampaudit.policy.schema import Cast, KeepFp32, Match, Reason, Rule
from ampaudit.trace import Role, Site
from ampaudit.trace.caster import MIXED_DTYPES, TWIN
from ampaudit.trace.flow import Flow
from ampaudit.trace.functional import overload_of
from ampaudit.trace.opnames import base_name
from ampaudit.trace.values import LOW_PRECISION_DTYPES

BACK = (1, 2, 4, 8)  # steps
_PROMOTING = ("cat", "concat", "stack", "where")
_SOURCE = "ampaudit scan --advise"


def exemptions_for(subject: AdviceContext, finding: Finding) -> Iterator[Exemption]:
    """Yield what to keep in float32 because of a finding: one site, then all readers of its large value."""
    context = subject.context
    weight = next((w for w in context.broken_weights if w.rpartition(".")[0] == finding.layer), None)
    if finding.phase == "weights" and weight is not None:
        users = _users(subject, weight)
        others = _island(subject, users).keys() - {s.id for s in users}
        yield Exemption(_in_order(subject, others), f"{weight} is infinite in 16 bits", weight)
        return
    site = context.site.get(finding.site)
    if site is None or site.id not in {s.id for s in context.graph_sites}:
        return
    start = context.flow.readers(site) if site.role.inserted else [site]
    first = [s for s in start if _takes_rules(s)]
    if not first:
        return
    why = f"{page_of(finding.code).title} ({finding.code})"
    if site.twin is not None and site.decision.reason == TWIN:
        yield Exemption((site.twin.site,), why)  # rules apply to the op's inputs, not to its inside
        return
    yield Exemption(_in_order(subject, {s.id for s in first}), why)
    island = _island(subject, first)
    if len(island) > len(first):
        yield Exemption(_in_order(subject, island.keys()), why)
    if finding.kind != "overflow" or _reads_inaccurate(subject, first):
        yield from _upstream(subject, first, island, why)


def _takes_rules(site: Site) -> bool:
    """Return whether a rule can keep a site in float32; an op that torch itself rejects has no such rule."""
    return site.facts is not None and site.decision.cast is not Cast.FORBID


def _reads_inaccurate(subject: AdviceContext, first: Sequence[Site]) -> bool:
    """Return whether a site reads a value that was flushed or is already inaccurate."""
    context = subject.context
    before = [context.observed(producer.id) for site in first for producer in context.flow.producers(site)]
    accuracies = (stats.sqnr_db for stats in before if stats.sqnr_db is not None)
    return any(stats.samples.flushed for stats in before) or any(
        db < context.config.min_sqnr for db in accuracies
    )


def _upstream(
    subject: AdviceContext, first: Sequence[Site], island: Mapping[SiteId, Site], why: str
) -> Iterator[Exemption]:
    """Extend the island upstream in growing steps, since the error comes from an input."""
    region = dict(island)
    frontier = list(first)
    for back in range(1, BACK[-1] + 1):
        producers = [m for step in frontier for m in subject.context.flow.producers(step)]
        frontier = [m for m in producers if m.id not in region and _takes_rules(m)]
        region |= {m.id: m for m in frontier}
        if back in BACK or not frontier:
            yield Exemption(_in_order(subject, region.keys()), why)
        if not frontier:
            return


def _island(subject: AdviceContext, first: Sequence[Site]) -> dict[SiteId, Site]:
    """Add the readers of values above half of the format's limit, which must read them in float32.

    Ops that only pass values on are not measured: they have the peak of their input.
    """
    context = subject.context
    island = {site.id: site for site in first}
    frontier = [(site, 0.0) for site in first]
    while frontier:
        site, inherited = frontier.pop()
        stats = context.observed(site.id)
        peak = stats.ref_peak if stats.elements else inherited
        if peak <= context.number_format.max / 2:
            continue
        readers = [r for r in context.flow.readers(site) if r.id not in island and _takes_rules(r)]
        island |= {reader.id: reader for reader in readers}
        frontier += [(reader, peak) for reader in readers]
    return island


def border(subject: AdviceContext, exempt: Set[SiteId]) -> tuple[SiteId, ...]:
    """Return the first ops after exempt sites that reject float32 next to weights stored in 16 bits.

    Elementwise ops promote, so float32 passes through them; a product or a norm with 16-bit weights needs
    its input in 16 bits again.
    """
    if subject.rules.file.weights.storage != "lower":
        return ()
    flow, edge = subject.context.flow, set[SiteId]()
    for graph in (traced.graph for traced in flow.traces):
        wide: set[fx.Node] = set()
        for node in graph.nodes:
            site = flow.site(node)
            if site is not None and (site.id in exempt or (site.twin and site.twin.site in exempt)):
                wide.add(node)
            elif not wide.isdisjoint(node.all_input_nodes) and not _stays(flow, node, site, wide):
                # a refused op is traced as if its inputs were promoted
                if site is not None and site.decision.reason == MIXED_DTYPES:
                    edge.add(site.id)
                elif site is None or site.role is Role.VIEW or _promotes(node, wide):
                    wide.add(node)
                elif site.facts is not None:
                    edge.add(site.id)
    return _in_order(subject, edge)


def _stays(flow: Flow, node: fx.Node, site: Site | None, wide: Set[fx.Node]) -> bool:
    """Return whether an op keeps its dtype although one of its inputs is now float32."""
    if site is None:
        return False
    in_float32 = site.decision.cast is Cast.FLOAT32 and site.decision.reason != MIXED_DTYPES
    converts = site.role.converts or in_float32
    return converts or (flow.writes(site) and node.args[0] not in wide)


def _promotes(node: fx.Node, wide: Set[fx.Node]) -> bool:
    """Return whether an op accepts float32 next to its other inputs."""
    values = [other.meta.get("val") for other in node.all_input_nodes if other not in wide]
    narrow = any(isinstance(value, torch.Tensor) and value.dtype in LOW_PRECISION_DTYPES for value in values)
    op = overload_of(node.target)
    return not narrow or op is None or torch.Tag.pointwise in op.tags or base_name(op) in _PROMOTING


def _in_order(subject: AdviceContext, sites: Set[SiteId]) -> tuple[SiteId, ...]:
    ordered: dict[SiteId, None] = {}
    for site in subject.context.graph_sites:
        calls = (site.twin.site, site.id) if site.twin is not None else (site.id,)
        ordered |= dict.fromkeys(name for name in calls if name in sites)
    return tuple(ordered)


def _users(subject: AdviceContext, weight: str) -> list[Site]:
    context = subject.context
    return [s for s in context.graph_sites if weight in context.weights_read.get(s.id, ())]


def exempt_sites(subject: AdviceContext, members: Sequence[Exemption]) -> tuple[SiteId, ...]:
    """Return all sites to keep in float32, in graph order."""
    users = (s.id for exemption in members if exemption.weight for s in _users(subject, exemption.weight))
    return _in_order(subject, {*users, *(site for exemption in members for site in exemption.sites)})


def propose_exemptions(subject: AdviceContext, members: Sequence[Exemption]) -> Proposal:
    """Propose one policy with all exemptions, and a rule for each reason."""
    weights = [exemption.weight for exemption in members if exemption.weight]
    rules = [
        _rule(f"keep-{w}", Match(parameter=(literal(w),)), Cast.FLOAT32, f"{w} is infinite in 16 bits")
        for w in weights
    ]
    covered: set[SiteId] = set()
    for why in dict.fromkeys(exemption.why for exemption in members):
        sites = {site for exemption in members if exemption.why == why for site in exemption.sites}
        rules += _about_sites("keep", _in_order(subject, sites - covered), Cast.FLOAT32, why)
        covered |= sites
    every = exempt_sites(subject, members)
    back = border(subject, frozenset(every))
    rules += _about_sites("return", back, Cast.LOWER, "later ops run in 16 bits again")
    rules = _with_unique_ids(rules, {rule.id for rule in subject.rules.file.rules})
    what = ", ".join(weights) if weights else listed(every)
    paste, policy = "\n".join(map(_paste, rules)), subject.rules
    stored = policy.file.weights
    if weights and stored.storage == "lower":
        more = (KeepFp32(parameter=(literal(weight),)) for weight in weights)
        stored = stored.model_copy(update={"keep": (*stored.keep, *more)})
        # a weights section replaces the inherited one as a whole
        weights_text = quoted(stored.model_dump(mode="json", exclude_defaults=True))
        paste = f"weights: {weights_text}\nrules:\n{paste}"
    # the first rule that matches takes precedence
    file = policy.file.model_copy(update={"rules": (*rules, *policy.file.rules), "weights": stored})
    changed = RuleSet(file, policy.ops, policy.environment)
    return Proposal("rule", f"keep {what} in float32", paste, rules=changed, exemptions=tuple(members))


def _with_unique_ids(rules: Sequence[Rule], reserved: Set[str]) -> list[Rule]:
    """Make the ids unique, since a rule replaces an inherited one with the same id."""
    renamed: list[Rule] = []
    for rule in rules:
        name = rule.id
        while name in reserved or any(name == other.id for other in renamed):
            name += " too"
        renamed.append(rule.model_copy(update={"id": name}))
    return renamed


def _about_sites(name: str, sites: Sequence[SiteId], cast: Cast, why: str) -> list[Rule]:
    if not sites:
        return []
    return [_rule(f"{name}-{sites[0]}", Match(site=tuple(map(literal, sites))), cast, why)]


def _rule(name: str, match: Match, cast: Cast, why: str) -> Rule:
    return Rule(id=f"mine/{name}", match=match, cast=cast, reason=Reason.RANGE, why=why, source=_SOURCE)


def literal(name: str) -> str:
    """Escape a name into a glob that matches only it."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


def quoted(value: object) -> str:
    """Format a value as one line of YAML: JSON, with unprintable characters escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in text)


def _paste(rule: Rule) -> str:
    """Format a rule as YAML, ready to paste into a file that extends the policy."""
    (key, values), *_ = rule.match.model_dump(exclude_defaults=True).items()
    lines = [
        f"- id: {quoted(rule.id)}",
        f"match: {{{key}: {quoted(list(values))}}}",
        f"cast: {rule.cast}",
        f"reason: {rule.reason}",
        f"why: {quoted(rule.why)}",
        f"source: {rule.source}",
    ]
    return "\n  ".join(lines)
