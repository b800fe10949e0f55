"""Separates custom backwards from a model's graph: each gets its own graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from ampaudit.trace.flatten import (
    BACKWARD_END,
    BACKWARD_START,
    OUTPUT_GRADIENT,
    has_effect,
    mark_number,
    saved_values,
)
from ampaudit.trace.graph import CustomBackward, Placeholder, Slot, TracedModel, build_sites
from ampaudit.trace.internals import FakeTensor

__all__ = ["separate_backwards"]

_LOST = "it reads a tensor that no op of the trace computes"


@dataclass(slots=True)
class _Section:
    """The nodes of one custom backward, which are consecutive."""

    end: fx.Node
    nodes: list[fx.Node]
    values: list[fx.Node] = field(default_factory=list)  # read from the forward pass or another backward
    shared: list[fx.Node] = field(default_factory=list)  # read by another backward

    @property
    def gradients(self) -> list[Any]:
        """The returned gradients, ``None`` if absent; those of leaves come last."""
        return list(self.end.args[0])  # type: ignore[arg-type]

    @property
    def leaves(self) -> list[fx.Node]:
        """The leaves whose gradient it sets."""
        return list(self.end.args[1])  # type: ignore[arg-type]


def separate_backwards(traced: TracedModel) -> TracedModel:
    """Move custom backwards into graphs of their own; a mark saves the values that each of them needs."""
    if not traced.custom_backwards:
        return traced
    sections = {mark_number(section.end): section for section in _sections(traced.graph)}
    owner = {node: number for number, section in sections.items() for node in section.nodes}
    for number, section in sections.items():
        used = dict.fromkeys(n for node in section.nodes for n in node.all_input_nodes)
        used |= dict.fromkeys(node for node in section.gradients if node is not None)
        section.values = [node for node in used if owner.get(node) != number]
        for node in section.values:
            if node in owner and node not in sections[owner[node]].shared:
                sections[owner[node]].shared.append(node)
    followed = list(_followed(traced, sections, owner))
    for backward in followed:
        if backward.failure is not None:
            sections[backward.number].values.clear()
    graph, leaves = _without(traced.graph, sections, owner)
    inside = {node.name for node in owner}
    backwards = [
        _separated(replace(backward, leaves=leaves[backward.number]), sections, owner, traced)
        for backward in followed
    ]
    return replace(
        traced,
        graph=graph,
        sites=tuple(site for site in traced.sites if site.node not in inside),
        custom_backwards=tuple(backwards),
    )


def _followed(
    traced: TracedModel, sections: dict[int, _Section], owner: dict[fx.Node, int]
) -> Iterator[CustomBackward]:
    """Return the custom backwards in order; those that read unknown or failed values fail."""
    failed: dict[int, str] = {}
    for backward in traced.custom_backwards:
        values = sections[backward.number].values
        broken = next((failed[owner[node]] for node in values if owner.get(node) in failed), None)
        unknown = any(isinstance(traced.tensors.get(node.name), FakeTensor) for node in values)
        result = replace(backward, failure=backward.failure or broken or (_LOST if unknown else None))
        if result.failure is not None:
            failed[backward.number] = result.failure
        yield result


def _sections(graph: fx.Graph) -> Iterator[_Section]:
    nodes: list[fx.Node] | None = None
    for node in graph.nodes:
        if node.target is BACKWARD_START:
            nodes = []
        elif node.target is BACKWARD_END:
            assert nodes is not None, "a backward starts before it ends"
            yield _Section(node, nodes)
            nodes = None
        elif nodes is not None:
            nodes.append(node)


def _without(
    graph: fx.Graph, sections: dict[int, _Section], owner: dict[fx.Node, int]
) -> tuple[fx.Graph, dict[int, tuple[int, ...]]]:
    """Return the graph with marks for each backward's saved values, and the positions of leaves."""
    forward = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    positions: dict[int, tuple[int, ...]] = {}
    for node in graph.nodes:
        if node.target is BACKWARD_END:
            number = mark_number(node)
            saved_nodes = [value for value in sections[number].values if value not in owner]
            leaves = sections[number].leaves
            positions[number] = tuple(range(len(saved_nodes), len(saved_nodes) + len(leaves)))
            forward.call_function(saved_values, ([env[value] for value in (*saved_nodes, *leaves)], number))
        elif node.op == "output":
            forward.output(fx.node.map_arg(node.args[0], lambda n: env[n]))
        elif node not in owner and node.target is not BACKWARD_START:
            env[node] = forward.node_copy(node, lambda n: env[n])
    forward.lint()
    return forward, positions


def _separated(
    backward: CustomBackward, sections: dict[int, _Section], owner: dict[fx.Node, int], traced: TracedModel
) -> CustomBackward:
    """Return the backward with its own graph, unless it could not be traced."""
    if backward.failure is not None:
        return backward
    section = sections[backward.number]
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inputs: list[tuple[str, int | str]] = []
    placeholders: list[Placeholder] = []
    gradients = [node for node in section.nodes if node.target is OUTPUT_GRADIENT]
    saved_nodes = [node for node in section.values if node not in owner]
    for node in (*gradients, *section.values):
        env[node] = graph.create_node("placeholder", node.name, (), {}, name=node.name)
        env[node].meta = dict(node.meta)
        dtype = getattr(node.meta.get("val"), "dtype", None)
        placeholders.append(Placeholder(env[node].name, Slot.INPUT, node.name, dtype))
        if node in owner:
            source = ("gradient", node.args[2]) if node in gradients else ("shared", node.name)
        else:
            source = ("value", saved_nodes.index(node))
        inputs.append(source)  # type: ignore[arg-type]
    for node in section.nodes:
        if node not in env:
            env[node] = graph.node_copy(node, lambda n: env[n])
    returned = section.gradients
    count = len(returned) - len(section.leaves)
    gradient_nodes = [node for node in returned[:count] if node is not None]
    numbers = iter(range(len(gradient_nodes)))
    returns = tuple(None if node is None else next(numbers) for node in returned[:count])
    graph.output(tuple(env[node] for node in (*gradient_nodes, *returned[count:], *section.shared)))
    graph.eliminate_dead_code(has_effect)
    graph.lint()
    sites = tuple(replace(site, layer=backward.layer) for site in build_sites(graph, placeholders))
    inside = replace(
        traced,
        graph=graph,
        placeholders=tuple(placeholders),
        tensors={},
        sites=sites,
        custom_backwards=(),
        outputs=(),
        structure=None,
    )
    return replace(
        backward,
        traced=inside,
        inputs=tuple(inputs),
        returns=returns,
        shares=tuple(node.name for node in section.shared),
    )
