"""Decides for a whole graph: colours, and rules that look at an op's neighbours."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ampaudit.policy.coloring import color
from ampaudit.policy.decide import Decision, NeighborSide, RuleSet
from ampaudit.policy.facts import OpFacts
from ampaudit.policy.schema import COLORS, Cast

__all__ = ["PlanSite", "plan_graph"]

_FLOAT32 = (Cast.FLOAT32, Cast.FORBID, Cast.SET_DTYPE, Cast.APPEND_DTYPE)
_BY_INPUTS = (Cast.FOLLOW, Cast.WIDEST)


@dataclass(frozen=True, slots=True)
class PlanSite:
    """An op of a graph: what rules may look at, and which earlier ops it takes floating-point values from."""

    facts: OpFacts
    inputs: tuple[int, ...]


def plan_graph(rules: RuleSet, sites: Sequence[PlanSite]) -> list[Decision]:
    """One decision per site, in order. Time grows with sites plus edges."""
    decisions = [rules.decide(site.facts) for site in sites]
    if not rules.needs_graph:
        return decisions
    decisions = _painted(decisions, sites)
    return _with_neighbours(rules, decisions, sites)


def _painted(decisions: list[Decision], sites: Sequence[PlanSite]) -> list[Decision]:
    if not any(d.cast in COLORS for d in decisions):
        return decisions
    low = color([d.cast for d in decisions], [site.inputs for site in sites])
    return [_resolved(d, is_low) for d, is_low in zip(decisions, low, strict=True)]


def _resolved(decision: Decision, low: bool) -> Decision:
    colour = decision.cast
    if colour not in COLORS:
        return decision
    if colour in (Cast.ALLOW, Cast.DENY):
        how = "always" if colour is Cast.ALLOW else "denied"
    else:
        how = "painted 16-bit by its neighbours" if low else "painted float32 by its neighbours"
    cast = Cast.LOWER if low else Cast.FLOAT32
    return replace(decision, cast=cast, why=f"{decision.why} ({colour}: {how})")


def _with_neighbours(rules: RuleSet, decisions: list[Decision], sites: Sequence[PlanSite]) -> list[Decision]:
    """Apply rules about neighbours until nothing changes; a site only ever goes up to float32."""
    users: list[list[int]] = [[] for _ in sites]
    for index, site in enumerate(sites):
        for source in site.inputs:
            users[source].append(index)
    wide = _widths(decisions, sites)
    pending = deque(range(len(sites)))
    while pending:
        index = pending.popleft()
        if wide[index]:
            continue
        near: set[NeighborSide] = set()
        if any(wide[i] for i in sites[index].inputs):
            near.add("producer")
        if any(wide[i] for i in users[index]):
            near.add("consumer")
        decision = rules.decide(sites[index].facts, frozenset(near)) if near else decisions[index]
        follows = decisions[index].cast in _BY_INPUTS and "producer" in near
        if follows or decision.cast in _FLOAT32:
            wide[index] = True
            if decision.cast in _FLOAT32:
                decisions[index] = decision
            pending.extend([*sites[index].inputs, *users[index]])
    return decisions


def _widths(decisions: Sequence[Decision], sites: Sequence[PlanSite]) -> list[bool]:
    """Whether each op's result is float32, as far as the decisions alone say."""
    wide: list[bool] = []
    for decision, site in zip(decisions, sites, strict=True):
        by_inputs = decision.cast in _BY_INPUTS and any(wide[i] for i in site.inputs)
        wide.append(decision.cast in _FLOAT32 or by_inputs)
    return wide
