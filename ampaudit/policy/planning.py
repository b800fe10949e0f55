"""Decides the casts of a whole graph, with graph coloring and rules about neighbors.

A node is *allow* (always 16 bits), *deny* (dangerous, as is anything computed from it), *infer* (safe unless
downstream of a deny), *clear* (no numerical effect) or uncolored (float32). The steps are those of
``grappler/optimizers/auto_mixed_precision.cc``, commit 219b6ee; its handling of loops and tensor lists has no
counterpart in a traced graph.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ampaudit.policy.decide import Decision, NeighborSide, RuleSet
from ampaudit.policy.matching import OpFacts
from ampaudit.policy.schema import COLORS, Cast

__all__ = ["PlanSite", "color", "plan_graph"]

_FREE = (Cast.INFER, Cast.CLEAR)
_FLOAT32 = (Cast.FLOAT32, Cast.FORBID, Cast.SET_DTYPE, Cast.APPEND_DTYPE)
_BY_INPUTS = (Cast.FOLLOW, Cast.WIDEST)


@dataclass(frozen=True, slots=True)
class PlanSite:
    """The facts about an op in a graph, and the indices of the ops that produce its floating-point inputs."""

    facts: OpFacts
    inputs: tuple[int, ...]


def plan_graph(rules: RuleSet, sites: Sequence[PlanSite]) -> list[Decision]:
    """Decide the cast of each site, in order, in time linear in sites plus edges."""
    decisions = [rules.decide(site.facts) for site in sites]
    if not rules.needs_graph:
        return decisions
    decisions = _resolve_colors(decisions, sites)
    return _apply_neighbor_rules(rules, decisions, sites)


def _resolve_colors(decisions: list[Decision], sites: Sequence[PlanSite]) -> list[Decision]:
    if not any(d.cast in COLORS for d in decisions):
        return decisions
    low = color([d.cast for d in decisions], [site.inputs for site in sites])
    return [_resolve_color(d, is_low) for d, is_low in zip(decisions, low, strict=True)]


def _resolve_color(decision: Decision, low: bool) -> Decision:
    color = decision.cast
    if color not in COLORS:
        return decision
    if color in (Cast.ALLOW, Cast.DENY):
        how = "always" if color is Cast.ALLOW else "denied"
    else:
        how = "colored 16-bit by its neighbors" if low else "colored float32 by its neighbors"
    cast = Cast.LOWER if low else Cast.FLOAT32
    return replace(decision, cast=cast, why=f"{decision.why} ({color}: {how})")


def _apply_neighbor_rules(
    rules: RuleSet, decisions: list[Decision], sites: Sequence[PlanSite]
) -> list[Decision]:
    """Apply rules about neighbors to a fixed point; sites are only ever promoted to float32."""
    users = _users_of([site.inputs for site in sites])
    wide: list[bool] = []  # whether each result is float32, first by the decisions alone
    for decision, site in zip(decisions, sites, strict=True):
        by_inputs = decision.cast in _BY_INPUTS and any(wide[i] for i in site.inputs)
        wide.append(decision.cast in _FLOAT32 or by_inputs)
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


def color(colors: Sequence[Cast], inputs: Sequence[Sequence[int]]) -> list[bool]:
    """Decide which nodes run in 16 bits, in time linear in nodes plus edges.

    Args:
        colors: Color of each node; any other cast means float32.
        inputs: Indices of the input nodes of each node.
    """
    users = _users_of(inputs)
    nodes = range(len(colors))

    def free(node: int) -> bool:
        return colors[node] in _FREE

    # 1 and 2: deny spreads forward through free nodes that lead to a deny or infer node
    leads = _reach((n for n in nodes if colors[n] in (Cast.DENY, Cast.INFER)), inputs, free)
    denied = _reach((n for n in nodes if colors[n] is Cast.DENY), users, lambda n: free(n) and n in leads)
    low = {n for n in nodes if colors[n] is Cast.ALLOW}

    # 3: free nodes with allow nodes on both sides
    def undecided(node: int) -> bool:
        return free(node) and node not in denied

    below = _reach(low, users, undecided)
    above = _reach(low, inputs, undecided)
    low |= {n for n in below & above if undecided(n)}

    # 4: clear nodes that touch a low node through clear nodes
    def clear(node: int) -> bool:
        return colors[node] is Cast.CLEAR and node not in denied

    both = [[*inputs[n], *users[n]] for n in nodes]
    low |= {n for n in _reach(low, both, clear) if clear(n)}
    return [n in low for n in nodes]


def _reach(
    starts: Iterable[int], edges: Sequence[Collection[int]], passes: Callable[[int], bool]
) -> set[int]:
    """Return the start nodes and every node reachable from them through passing nodes."""
    reached = set(starts)
    pending = list(reached)
    while pending:
        for node in edges[pending.pop()]:
            if node not in reached and passes(node):
                reached.add(node)
                pending.append(node)
    return reached


def _users_of(inputs: Sequence[Sequence[int]]) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in inputs]
    for node, sources in enumerate(inputs):
        for source in sources:
            users[source].append(node)
    return users
