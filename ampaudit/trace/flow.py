"""Follows values through a traced graph: producers and consumers of a site, through views and casts.

Code that takes an expert by its number, as Transformers' loop over the experts does, shows the number in the
graph. Where a tensor chooses, as in its ``batched_mm`` and ``grouped_mm``, only a run shows the choice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import fx

from ampaudit.core.sites import SiteId
from ampaudit.trace.functional import overload_of
from ampaudit.trace.graph import Placeholder, Role, Site, Slot, TracedModel
from ampaudit.trace.opnames import base_name, converts, mutated_arguments, named_arguments

_PASS_THROUGH = (Role.VIEW, Role.CAST, Role.INSERTED_CAST, Role.WEIGHT_CAST)


class Flow:
    """Answers questions about the flow of values through a traced graph.

    The graphs of other batches supply the sites that the first one lacks.
    """

    def __init__(self, traced: TracedModel, *others: TracedModel) -> None:
        self.traced = traced
        self.traces = (traced, *others)
        self._sites: dict[fx.Node, Site] = {}
        self._placeholders: dict[fx.Node, Placeholder] = {}
        self._nodes: dict[SiteId, fx.Node] = {}
        for each in self.traces:
            sites, placeholders = each.site_of_node, {p.node: p for p in each.placeholders}
            for node in each.graph.nodes:
                if node.name in sites:
                    self._sites[node] = sites[node.name]
                    self._nodes.setdefault(sites[node.name].id, node)
                elif node.name in placeholders:
                    self._placeholders[node] = placeholders[node.name]

    def node(self, site: Site) -> fx.Node:
        """Return the graph's node of a site."""
        return self._nodes[site.id]

    def site(self, node: fx.Node) -> Site | None:
        """Return the site of a node."""
        return self._sites.get(node)

    def base(self, site: Site | None) -> str:
        """Return the site's op without overload and in-place mark: ``add`` for ``aten.add_.Tensor``."""
        if site is None:
            return ""
        op = overload_of(self.node(site).target)
        return base_name(op).rstrip("_") if op is not None else ""

    def arguments(self, site: Site) -> dict[str, Any]:
        """Return the node's arguments by their schema names; values are nodes."""
        node = self.node(site)
        op = overload_of(node.target)
        return {} if op is None else named_arguments(op, node.args, dict(node.kwargs))

    def writes(self, site: Site) -> bool:
        """Return whether a site's op writes to one of its inputs."""
        op = overload_of(self.node(site).target)
        return op is not None and bool(mutated_arguments(op))

    def root(self, node: Any) -> fx.Node | None:
        """Return the node that computed a value, before views, casts and tuple access."""
        while isinstance(node, fx.Node):
            site = self._sites.get(node)
            through = node.target is operator.getitem or (site is not None and site.role in _PASS_THROUGH)
            if not through or not node.all_input_nodes:
                return node
            node = node.all_input_nodes[0]
        return None

    def producer(self, node: Any) -> Site | None:
        """Return the site that computed a value; ``None`` for inputs, weights and Python numbers."""
        root = self.root(node)
        return self._sites.get(root) if root is not None else None

    def produced_by(self, node: Any, *ops: str) -> Site | None:
        """Return the producer, if its op is one of these."""
        site = self.producer(node)
        return site if self.base(site) in ops else None

    def placeholder(self, node: Any) -> Placeholder | None:
        """Return the placeholder that a value views or casts, if any."""
        root = self.root(node)
        return self._placeholders.get(root) if root is not None else None

    def is_weight(self, node: Any) -> bool:
        """Return whether a value is a parameter, buffer or constant."""
        placeholder = self.placeholder(node)
        return placeholder is not None and placeholder.slot is not Slot.INPUT

    def producers(self, site: Site) -> list[Site]:
        """Return the sites whose values a site reads."""
        sites = (self.producer(node) for node in self.node(site).all_input_nodes)
        return [producer for producer in sites if producer is not None]

    def readers(self, site: Site) -> list[Site]:
        """Return the sites that read a site's value."""
        return list({reader.id: reader for reader in self._readers(self.node(site))}.values())

    def _readers(self, node: fx.Node) -> Iterator[Site]:
        for user in node.users:
            site = self._sites.get(user)
            if user.target is operator.getitem or (site is not None and site.role in _PASS_THROUGH):
                yield from self._readers(user)
            elif site is not None:
                yield site

    def _nearest(self, site: Site, steps: int, next_to: Callable[[Site], list[Site]]) -> Iterator[Site]:
        """Yield the sites that a number of steps lead to, each once, the nearest first."""
        frontier, visited = [site], {site.id}
        for _ in range(steps):
            following = {n.id: n for step in frontier for n in next_to(step) if n.id not in visited}
            visited |= following.keys()
            frontier = list(following.values())
            yield from frontier

    def upstream(self, site: Site, steps: int) -> Iterator[Site]:
        """Yield the sites whose values lead to a site in a number of steps, each once, the nearest first."""
        return self._nearest(site, steps, self.producers)

    def leads_to(self, site: Site, *ops: str, within: int = 3) -> Site | None:
        """Return the nearest reader with one of these ops, within a number of steps."""
        readers = self._nearest(site, within, self.readers)
        return next((reader for reader in readers if self.base(reader) in ops), None)

    def comes_from(self, node: Any, *ops: str, within: int = 3) -> Site | None:
        """Return the nearest producer with one of these ops, within a number of steps."""
        producer = self.producer(node)
        producers = () if producer is None else chain((producer,), self.upstream(producer, within - 1))
        return next((each for each in producers if self.base(each) in ops), None)

    def reaches(self, site: SiteId, others: frozenset[SiteId]) -> bool:
        """Return whether a value flows from a site into one of the others."""
        frontier, visited = [self._nodes[site]], set[fx.Node]()
        while frontier:
            for user in frontier.pop().users:
                reader = self._sites.get(user)
                if reader is not None and reader.id in others:
                    return True
                if user not in visited:
                    visited.add(user)
                    frontier.append(user)
        return False


class UnusedSlices(NamedTuple):
    """Matrices of a layer's stacks that nothing takes: their number, of how many, and their elements."""

    unused: int
    of: int
    elements: int


class ParameterUse(NamedTuple):
    """The layers with a used parameter, the number of elements of each layer, and stacks used in part."""

    used: frozenset[str]
    sizes: dict[str, int]
    parts: dict[str, UnusedSlices]


@dataclass(frozen=True, slots=True)
class StackChoice:
    """A call in which a tensor chooses matrices of a stack."""

    parameter: str  # name of the stack
    count: int  # of the matrices in the stack
    grouped: bool  # whether the tensor holds the end of each matrix's rows instead of matrix numbers
    index: fx.Node  # the node of the tensor

    def chosen(self, index: torch.Tensor) -> torch.Tensor:
        """Return for each matrix whether it is used, for a value of the tensor."""
        if self.grouped:
            return index.diff(prepend=index.new_zeros(1)) > 0
        if index.dtype is torch.bool:
            return index.reshape(self.count, -1).any(1)
        used = torch.zeros(self.count, dtype=torch.bool, device=index.device)
        used[index.flatten()] = True
        return used


def parameter_use(
    graphs: Collection[TracedModel], choices: Mapping[str, Collection[int]], empty: Collection[SiteId]
) -> ParameterUse:
    """Return which parameters, and which parts of stacks, are used by any of the graphs.

    A tied parameter counts for the first layer that has it, and is used if any of its names is. ``choices``
    are the numbers of the matrices that tensors chose in a run, by name of the stack; ``empty`` are the
    sites whose values had no elements in it, and which therefore used nothing.
    """
    used: set[str] = set()
    sizes: dict[str, int] = {}
    stacks: dict[str, torch.Tensor] = {}
    counted: set[int] = set()
    for each in graphs:
        nodes = {node.name: node for node in each.graph.nodes}
        idle = {name for name, site in each.site_of_node.items() if site.id in empty}
        read = {
            id(tensor)
            for name, tensor in each.tensors.items()
            if any(user.name not in idle for _, user in _readers(nodes[name]))
        }
        for place in each.placeholders:
            if place.slot is Slot.PARAMETER:
                layer, tensor = place.name.rpartition(".")[0], each.tensors[place.node]
                if id(tensor) in read:
                    used.add(layer)
                sizes[layer] = sizes.get(layer, 0) + (0 if id(tensor) in counted else tensor.numel())
                counted.add(id(tensor))
                if tensor.dim() > 2 and id(tensor) in read:
                    stacks[place.name] = tensor
    slices = {part for each in graphs for part in slices_taken(each)}
    slices |= {(name, number) for name, numbers in choices.items() for number in numbers}
    parts: dict[str, UnusedSlices] = {}
    for name, tensor in stacks.items():
        layer = name.rpartition(".")[0]
        unused = sum((name, number) not in slices for number in range(len(tensor)))
        if unused and (name, None) not in slices:
            before = parts[layer].elements if layer in parts else 0
            parts[layer] = UnusedSlices(unused, len(tensor), before + unused * tensor[0].numel())
    return ParameterUse(frozenset(used), sizes, parts)


def slices_taken(traced: TracedModel) -> set[tuple[str, int | None]]:
    """Return which matrices a graph takes: a stack's name with a number, or ``None`` for all of them."""
    choices = stack_choices(traced)
    return {(name, _number(user, count)) for name, count, _, user in _reads(traced) if user not in choices}


def stack_choices(traced: TracedModel) -> dict[fx.Node, StackChoice]:
    """Return the calls in which a tensor chooses."""
    choices: dict[fx.Node, StackChoice] = {}
    for name, count, stack, user in _reads(traced):
        op = overload_of(user.target)
        if op is None:
            continue
        arguments, base = named_arguments(op, user.args, dict(user.kwargs)), base_name(op)
        index: Any = None
        grouped = "grouped_mm" in base
        if grouped and arguments.get("mat2", arguments.get("weight")) is stack:
            index = arguments.get("offs")
        elif base == "index" and arguments["self"] is stack:
            index = arguments["indices"][0]
        elif base == "index_select" and arguments["dim"] == 0:
            index = arguments["index"]
        if isinstance(index, fx.Node):
            choices[user] = StackChoice(name, count, grouped, index)
    return choices


def _reads(traced: TracedModel) -> Iterator[tuple[str, int, fx.Node, fx.Node]]:
    """Yield each stack with its size, the node that has its values, and a node that reads it."""
    nodes = {node.name: node for node in traced.graph.nodes}
    for place in traced.placeholders:
        tensor = traced.tensors.get(place.node)
        if place.slot is Slot.PARAMETER and tensor is not None and tensor.dim() > 2:
            for stack, user in _readers(nodes[place.node]):
                yield place.name, len(tensor), stack, user


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield what reads a parameter, behind casts and transposes of its matrices."""
    for user in node.users:
        if converts(user.target) or _transposes_matrices(user):
            yield from _readers(user)
        else:
            yield node, user


def _transposes_matrices(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.transpose.int:
        return False
    rank = node.meta["val"].dim()
    return all(isinstance(axis, int) and axis % rank for axis in node.args[1:3])


def _number(user: fx.Node, count: int) -> int | None:
    if user.target is torch.ops.aten.select.int and user.args[1] == 0 and isinstance(user.args[2], int):
        return user.args[2] % count
    return None
