"""Takes the author's own ways back out of a model's graph: each becomes a graph of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from ampaudit.trace.backward.marks import (
    BACKWARD_END,
    BACKWARD_START,
    OUTPUT_GRADIENT,
    mark_number,
    saved_values,
)
from ampaudit.trace.flatten import has_effect
from ampaudit.trace.graph import CustomBackward, Placeholder, Slot, TracedModel
from ampaudit.trace.internals import FakeTensor
from ampaudit.trace.site_table import build_sites

__all__ = ["separate_backwards"]

_LOST = "it reads a tensor that no op of the trace has made"


@dataclass(slots=True)
class _Stretch:
    """The nodes of one way back, which lie together."""

    end: fx.Node
    nodes: list[fx.Node]
    values: list[fx.Node] = field(default_factory=list)  # of the forward pass, or of another way back
    shared: list[fx.Node] = field(default_factory=list)  # that others read

    @property
    def given(self) -> list[Any]:
        """What it returns: nodes, and ``None`` where there is no gradient; those of leaves come last."""
        return list(self.end.args[0])  # type: ignore[arg-type]

    @property
    def leaves(self) -> list[fx.Node]:
        """The leaves that it gives gradients."""
        return list(self.end.args[1])  # type: ignore[arg-type]


def separate_backwards(traced: TracedModel) -> TracedModel:
    """The traced model with its ways back apart; a mark keeps the values that each of them needs."""
    if not traced.custom_backwards:
        return traced
    stretches = {mark_number(found.end): found for found in _stretches(traced.graph)}
    owner = {node: number for number, found in stretches.items() for node in found.nodes}
    for number, found in stretches.items():
        used = dict.fromkeys(n for node in found.nodes for n in node.all_input_nodes)
        used |= dict.fromkeys(node for node in found.given if node is not None)
        found.values = [node for node in used if owner.get(node) != number]
        for node in found.values:
            if node in owner and node not in stretches[owner[node]].shared:
                stretches[owner[node]].shared.append(node)
    followed = list(_followed(traced, stretches, owner))
    for way in followed:
        if way.failure is not None:
            stretches[way.number].values.clear()
    graph, places = _without(traced.graph, stretches, owner)
    inside = {node.name for node in owner}
    ways = [replace(way, leaves=places[way.number]) for way in followed]
    ways = [w if w.failure is not None else _apart(w, stretches[w.number], owner, traced) for w in ways]
    return replace(
        traced,
        graph=graph,
        sites=tuple(site for site in traced.sites if site.node not in inside),
        custom_backwards=tuple(ways),
    )


def _followed(
    traced: TracedModel, stretches: dict[int, _Stretch], owner: dict[fx.Node, int]
) -> Iterator[CustomBackward]:
    """The ways back in their order; one fails that reads what is not known, or what a failed one makes."""
    failed: dict[int, str] = {}
    for way in traced.custom_backwards:
        values = stretches[way.number].values
        broken = next((failed[owner[node]] for node in values if owner.get(node) in failed), None)
        lost = any(isinstance(traced.tensors.get(node.name), FakeTensor) for node in values)
        found = replace(way, failure=way.failure or broken or (_LOST if lost else None))
        if found.failure is not None:
            failed[way.number] = found.failure
        yield found


def _stretches(graph: fx.Graph) -> Iterator[_Stretch]:
    nodes: list[fx.Node] | None = None
    for node in graph.nodes:
        if node.target is BACKWARD_START:
            nodes = []
        elif node.target is BACKWARD_END:
            assert nodes is not None, "a way back begins before it ends"
            yield _Stretch(node, nodes)
            nodes = None
        elif nodes is not None:
            nodes.append(node)


def _without(
    graph: fx.Graph, stretches: dict[int, _Stretch], owner: dict[fx.Node, int]
) -> tuple[fx.Graph, dict[int, tuple[int, ...]]]:
    """The graph with a mark for each way back, which keeps values; and where leaves are among these."""
    made = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    places: dict[int, tuple[int, ...]] = {}
    for node in graph.nodes:
        if node.target is BACKWARD_END:
            number = mark_number(node)
            kept = [value for value in stretches[number].values if value not in owner]
            leaves = stretches[number].leaves
            places[number] = tuple(range(len(kept), len(kept) + len(leaves)))
            made.call_function(saved_values, ([env[value] for value in (*kept, *leaves)], number))
        elif node.op == "output":
            made.output(fx.node.map_arg(node.args[0], lambda n: env[n]))
        elif node not in owner and node.target is not BACKWARD_START:
            env[node] = made.node_copy(node, lambda n: env[n])
    made.lint()
    return made, places


def _apart(
    way: CustomBackward, stretch: _Stretch, owner: dict[fx.Node, int], traced: TracedModel
) -> CustomBackward:
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    inputs: list[tuple[str, int | str]] = []
    places: list[Placeholder] = []
    gradients = [node for node in stretch.nodes if node.target is OUTPUT_GRADIENT]
    kept = [node for node in stretch.values if node not in owner]
    for node in (*gradients, *stretch.values):
        env[node] = graph.create_node("placeholder", node.name, (), {}, name=node.name)
        env[node].meta = dict(node.meta)
        dtype = getattr(node.meta.get("val"), "dtype", None)
        places.append(Placeholder(env[node].name, Slot.INPUT, node.name, dtype))
        if node in owner:
            source = ("gradient", node.args[2]) if node in gradients else ("shared", node.name)
        else:
            source = ("value", kept.index(node))
        inputs.append(source)  # type: ignore[arg-type]
    for node in stretch.nodes:
        if node not in env:
            env[node] = graph.node_copy(node, lambda n: env[n])
    given = stretch.given
    count = len(given) - len(stretch.leaves)
    made = [node for node in given[:count] if node is not None]
    numbers = iter(range(len(made)))
    returns = tuple(None if node is None else next(numbers) for node in given[:count])
    graph.output(tuple(env[node] for node in (*made, *given[count:], *stretch.shared)))
    graph.eliminate_dead_code(has_effect)
    graph.lint()
    sites = tuple(replace(site, layer=way.layer) for site in build_sites(graph, places))
    inside = replace(
        traced,
        graph=graph,
        placeholders=tuple(places),
        tensors={},
        sites=sites,
        custom_backwards=(),
        outputs=(),
        structure=None,
    )
    return replace(
        way,
        traced=inside,
        inputs=tuple(inputs),
        returns=returns,
        shares=tuple(node.name for node in stretch.shared),
    )
