"""Lists the places where a program rounds to 16 bits: each op with its casts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from ampaudit.run.lockstep import LockStep
from ampaudit.run.program import Program
from ampaudit.run.step import Step
from ampaudit.trace.graph import Role, Site, Slot
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["RoundingUnit", "rounding_units"]


@dataclass(frozen=True, slots=True)
class RoundingUnit:
    """Nodes that a rule would keep in float32 together.

    Attributes:
        site: the op that it is reported as.
        nodes: nodes whose values are rounded.
        given: names of the inputs and weights among them, by node.
    """

    site: Site
    nodes: frozenset[fx.Node]
    given: tuple[tuple[fx.Node, str], ...] = ()


def rounding_units(executor: LockStep) -> tuple[RoundingUnit, ...]:
    """Return the rounding units of a program in graph order.

    A weight belongs to the first op that reads it, and a cast of the policy's to its only reader. An input,
    and a cast that several ops read, stand for themselves, under the first of their readers.
    """
    program = executor.program
    steps = {step.node: step for step in program.steps}
    weights = _given(executor)
    inputs = {place.node for place in program.traced.placeholders if place.slot is Slot.INPUT}
    nodes: dict[fx.Node, list[fx.Node]] = {}
    for node in _rounding_nodes(program, executor):
        step = steps.get(node)
        role = step.site.role if step is not None and step.site is not None else None
        if step is not None and role in (Role.COMPUTE, Role.CAST):
            nodes.setdefault(node, []).append(node)
            continue
        readers = list(_readers(node, steps))
        shared = role is not Role.WEIGHT_CAST and (node.name not in weights or node.name in inputs)
        owner = node if not readers or (shared and len(readers) > 1) else readers[0].node
        nodes.setdefault(owner, []).append(node)
    order = {node: index for index, node in enumerate(program.traced.graph.nodes)}
    units = []
    for owner, members in nodes.items():
        site = _site(owner, steps)
        if site is not None:
            given = tuple((n, weights[n.name]) for n in members if n.name in weights)
            units.append((order[owner], RoundingUnit(site, frozenset(members), given)))
    return tuple(unit for _, unit in sorted(units, key=lambda pair: pair[0]))


def _rounding_nodes(program: Program, executor: LockStep) -> Iterator[fx.Node]:
    copies = executor.converted.copies
    places = {place.node: place for place in program.traced.placeholders}
    for node in program.inputs:
        place = places[node.name]
        if place.dtype in LOW_PRECISION_DTYPES and (place.slot is Slot.INPUT or place.node in copies):
            yield node
    for step in program.steps:
        if step.rounds and step.makes_values:
            yield step.node


def _given(executor: LockStep) -> dict[str, str]:
    """Map each node that rounds an input or weight to its name."""
    traced = executor.program.traced
    names = {place.node: place.name for place in traced.placeholders}
    casts = {site.node: site.weight for site in traced.sites if site.weight is not None}
    return names | casts


def _readers(node: fx.Node, steps: dict[fx.Node, Step]) -> Iterator[Step]:
    """Return the ops that read a value, behind views, selections and the policy's casts."""
    for user in node.users:
        step = steps.get(user)
        if step is None:
            continue
        if step.site is None or step.site.role not in (Role.COMPUTE, Role.CAST):
            yield from _readers(user, steps)
        else:
            yield step


def _site(node: fx.Node, steps: dict[fx.Node, Step]) -> Site | None:
    step = steps.get(node)
    if step is not None and step.site is not None and step.site.role is not Role.INSERTED_CAST:
        return step.site
    reader = next(_readers(node, steps), None)
    return reader.site if reader is not None else (step.site if step is not None else None)
