"""Matches the ops of two graphs: by value and name, then by what they read."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ampaudit.core.text import format_number
from ampaudit.policy.schema import synonyms
from ampaudit.run.lockstep import LockStep, Observer, StepCall
from ampaudit.run.program import Step
from ampaudit.trace.functional import overload_of
from ampaudit.trace.graph import Placeholder, Role, Site, Slot
from ampaudit.trace.opnames import base_name, named_arguments

# relative and absolute tolerance: rounding in either direction, and the smallest numbers of converters
_ROUNDING = {
    torch.float16: (2.0**-10, 1.2e-7),
    torch.bfloat16: (2.0**-7, 1e-37),
    torch.float32: (2.0**-21, 1e-37),
    torch.float64: (2.0**-21, 1e-37),
}

MIN_CLAMPED = 9990.0  # converters replace larger numbers by 10,000, or by a share of the format's largest
_TRANSPARENT_ROLES = (Role.VIEW, Role.CAST, Role.INSERTED_CAST, Role.WEIGHT_CAST)
# ops of one kind, besides synonyms
_KINDS = {"mm": "matmul", "bmm": "matmul", "_safe_softmax": "softmax"}
_MAX_SAMPLED = 2048  # elements that are kept of each value


class Matching:
    """The ops of an audited graph that correspond to ops of a reference.

    Two ops correspond if they compute the same values on the batch; each has one partner, preferably of the
    same name or kind. Ops whose values differ correspond if they are of the same kind and read corresponding
    values, or appear in the same order.

    ``inputs`` are pairs of input placeholders, the audited one first; values agree up to the relative
    ``tolerance``.
    """

    def __init__(
        self,
        reference: ComparedGraph,
        audited: ComparedGraph,
        inputs: dict[fx.Node, fx.Node],
        weights: dict[fx.Node, MatchedWeight],
        tolerance: float,
    ) -> None:
        self.reference = reference
        self.audited = audited
        self.tolerance = tolerance
        self.partner: dict[Op, Op] = {}  # partners of the audited ops
        self._matched: set[Op] = set()
        self._same = dict(inputs) | {node: match.other for node, match in weights.items()}
        self._index = _Index(reference, tolerance)
        self._equal: dict[fx.Node, list[fx.Node]] = {}
        # nodes of the audited graph, including views, with a value that occurs in the reference
        self.agreeing = {node for node in audited.values if self._matches(node)}
        self._names = {op.name: op for op in reference.ops.values()}
        self._by_value()
        self._by_structure()
        self._by_inputs()
        self._by_order()
        self._by_readers()
        self._by_inputs()

    @property
    def only_reference(self) -> list[Op]:
        """Ops of the reference without a partner, in order."""
        return [op for op in self.reference.ops.values() if op not in self._matched]

    @property
    def only_audited(self) -> list[Op]:
        """Ops of the audited graph without a partner, in order."""
        return [op for op in self.audited.ops.values() if op not in self.partner]

    def agrees(self, op: Op) -> bool:
        """Return whether an op agrees with its partner or, without one, with some op of the reference."""
        other = self.partner.get(op)
        return op.node in self.agreeing if other is None else self.same_value(other.node, op.node)

    def error(self, op: Op) -> float:
        """Return the relative difference of an op from its partner; without one, 0 if it agrees, else 1."""
        other = self.partner.get(op)
        if other is None:
            return 0.0 if op.node in self.agreeing else 1.0
        first, second = self.reference.values.get(other.node), self.audited.values.get(op.node)
        return 1.0 if first is None or second is None else agreement(first[1], second[1])

    def same_value(self, reference: fx.Node, audited: fx.Node) -> bool:
        """Return whether two nodes have the same elements in the same order."""
        first, second = self.reference.values.get(reference), self.audited.values.get(audited)
        if first is None or second is None or first[0] != second[0]:
            return first is second
        return agreement(first[1], second[1]) <= self.tolerance

    def source(self, node: fx.Node) -> fx.Node | None:
        """Return the op or placeholder of the reference for one of the audited graph."""
        op = self.audited.ops.get(node)
        if op is None:
            return self._same.get(node)
        other = self.partner.get(op)
        return None if other is None else other.node

    def _matches(self, node: fx.Node) -> bool:
        """Return whether a node is an input, or its value occurs in the reference, also as a number."""
        size, samples = self.audited.values[node]
        self._equal[node] = list(self._index.equal(size, samples))
        place = self.audited.places.get(node.name)
        if self._equal[node] or (place is not None and place.slot is Slot.INPUT):
            return True
        numbers = self.reference.numbers if size == 1 else ()
        return any(math.isclose(samples.item(), number, rel_tol=self.tolerance) for number in numbers)

    def _by_value(self) -> None:
        """Match ops with equal values: by name and kind, by kind, and then those of other kinds."""
        ops = self.reference.ops
        equal = {
            op: [ops[node] for node in self._equal[op.node] if node in ops]
            for op in self.audited.ops.values()
            if op.node in self._equal
        }
        for same_name, same_kind in ((True, True), (False, True), (True, False), (False, False)):
            for op, others in equal.items():
                if op in self.partner:
                    continue
                free = [
                    other
                    for other in others
                    if other not in self._matched
                    and (other.base == op.base or not same_kind)
                    and (other.site.layer == op.site.layer or not same_name)
                ]
                if free:
                    self._pair(op, max(free, key=lambda other: (self._common(op, other), -other.place)))

    def _by_structure(self) -> None:
        """Match remaining ops, in order, with ops of their kind that read the partners of their inputs."""
        for op in self.only_audited:
            others = dict.fromkeys(self._readers_of_partners(op))
            namesake = self._names.get(op.name)
            if namesake is not None:
                others[namesake] = None
            free = [o for o in others if o not in self._matched and o.base == op.base and self._fits(op, o)]
            if free:
                best = max(
                    free, key=lambda o: (2 * self._common(op, o) + (o is namesake) + _line(op, o), -o.place)
                )
                self._pair(op, best)

    def _by_inputs(self) -> None:
        """Match ops of different kinds that read the same values."""
        for op in self.only_audited:
            sources = {self.source(source) for source in op.sources}
            for other in self._readers_of_partners(op):
                if other not in self._matched and sources == set(other.sources) and self._fits(op, other):
                    self._pair(op, other)
                    break

    def _by_order(self) -> None:
        """Match the remaining ops of both graphs as sequences of kinds and sizes."""
        here, there = self.only_audited, self.only_reference
        keys = [(op.base, self._numel(op)) for op in here]
        others = [(op.base, self._numel(op, reference=True)) for op in there]
        for block in SequenceMatcher(None, keys, others, autojunk=False).get_matching_blocks():
            for op, other in zip(here[block.a :][: block.size], there[block.b :], strict=False):
                self._pair(op, other)

    def _by_readers(self) -> None:
        """Match the remaining ops, last first, with the corresponding operand of their reader's partner."""
        for op in reversed(self.only_audited):
            for reader in self.audited.readers.get(op.node, ()):
                other = self.partner.get(reader)
                if other is None:
                    continue
                sources = [
                    other.sources[i]
                    for i, s in enumerate(reader.sources[: len(other.sources)])
                    if s is op.node
                ]
                read = (self.reference.ops.get(source) for source in sources)
                free = [o for o in read if o is not None and o not in self._matched and self._fits(op, o)]
                if free:
                    self._pair(op, free[0])
                    break

    def _readers_of_partners(self, op: Op) -> Iterable[Op]:
        for source in op.sources:
            other = self.source(source)
            if other is not None:
                yield from self.reference.readers.get(other, ())

    def _fits(self, op: Op, other: Op) -> bool:
        return op.site.shape == other.site.shape or self._numel(op) == self._numel(other, reference=True)

    def _numel(self, op: Op, *, reference: bool = False) -> int | None:
        values = (self.reference if reference else self.audited).values.get(op.node)
        return None if values is None else values[0]

    def _pair(self, op: Op, other: Op) -> None:
        self.partner[op] = other
        self._matched.add(other)

    def _common(self, op: Op, other: Op) -> int:
        """Count the inputs of an op whose partners another op reads."""
        return sum(self.source(source) in other.sources for source in dict.fromkeys(op.sources))


def _line(op: Op, other: Op) -> bool:
    """Return whether both come from the same line of code."""
    return op.site.source is not None and op.site.source == other.site.source


class _Index:
    """Finds nodes of a graph by value."""

    def __init__(self, graph: ComparedGraph, tolerance: float) -> None:
        self._tolerance = tolerance
        sizes: defaultdict[int, list[tuple[float, int, fx.Node, torch.Tensor]]] = defaultdict(list)
        for number, (node, (size, samples)) in enumerate(graph.values.items()):
            sizes[size].append((_typical(samples), number, node, samples))
        self._sizes = {size: sorted(rows, key=lambda row: row[:2]) for size, rows in sizes.items()}
        self._keys = {size: [row[0] for row in rows] for size, rows in self._sizes.items()}

    def equal(self, size: int, samples: torch.Tensor) -> Iterator[fx.Node]:
        """Yield the nodes with a value, in graph order."""
        keys, rows = self._keys.get(size, []), self._sizes.get(size, [])
        usual, margin = _typical(samples), 4 * self._tolerance
        start = bisect_left(keys, usual * (1 - margin) - 1e-30)
        end = bisect_right(keys, usual * (1 + margin) + 1e-30)
        for _, _, node, other in sorted(rows[start:end], key=lambda row: row[1]):
            if agreement(other, samples) <= self._tolerance:
                yield node


def _typical(samples: torch.Tensor) -> float:
    """Return a key that is close for samples that agree: the mean of the middle half of magnitudes."""
    if not samples.numel():
        return 0.0
    size = samples.abs().nan_to_num(0.0, 0.0, 0.0)
    return float(size.sort().values[size.numel() // 4 : (3 * size.numel()) // 4 + 1].mean())


@dataclass(frozen=True, slots=True)
class MatchedWeight:
    """A weight of the audited model and its counterpart."""

    other: fx.Node  # placeholder of the reference
    transposed: bool = False  # whether it is stored transposed
    what: str = ""  # difference beyond rounding; empty if there is none
    clamped: bool = False  # whether only numbers beyond the format differ and stay large, as in masks


def match_weights(reference: ComparedGraph, audited: ComparedGraph) -> dict[fx.Node, MatchedWeight]:
    """Match weights by name, or else by content."""
    by_name = {reference.weight_name(node): node for node in reference.weights}
    alike = _Content(reference)
    matches: dict[fx.Node, MatchedWeight] = {}
    for node, tensor in audited.weights.items():
        other = by_name.get(audited.weight_name(node))
        if other is not None and reference.weights[other].shape == tensor.shape:
            if _rounded_alike(reference.weights[other], tensor):
                matches[node] = MatchedWeight(other)
                continue
            what = difference_of(reference.weights[other], tensor)
            matches[node] = MatchedWeight(other, False, what, _clamped(reference.weights[other], tensor))
        match = alike.find(tensor) if tensor.numel() > 1 else None
        if match is not None and (node not in matches or not match.transposed):
            matches[node] = match
    return matches


def _rounded_alike(reference: torch.Tensor, stored: torch.Tensor) -> bool:
    """Return whether a weight is the reference's, rounded to the dtype in which it is stored."""
    return not bool(_beyond(reference, stored).any())


def _beyond(reference: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    relative, absolute = _ROUNDING.get(stored.dtype, (2.0**-3, 1e-2))
    if reference.dtype in (torch.float16, torch.bfloat16):
        rounding = _ROUNDING[reference.dtype]
        relative, absolute = max(relative, rounding[0]), max(absolute, rounding[1])
    first, second = reference.float(), stored.float()
    return ~((first == second) | ((first - second).abs() <= relative * first.abs() + absolute))


def _clamped(reference: torch.Tensor, stored: torch.Tensor) -> bool:
    """Return whether a weight differs only where the reference exceeds the format, and is large there."""
    first, second = reference.float(), stored.float()
    beyond = first.abs() > torch.finfo(stored.dtype).max
    ended = beyond & (second.abs() >= MIN_CLAMPED) & (first * second > 0)
    return not bool((_beyond(reference, stored) & ~ended).any())


def difference_of(reference: torch.Tensor, stored: torch.Tensor) -> str:
    """Describe how a weight differs from the reference's."""
    square = stored.ndim == 2 and stored.shape[0] == stored.shape[1]
    if square and _rounded_alike(reference.t(), stored):
        return "is transposed"
    beyond = _beyond(reference, stored)
    count = int(beyond.sum())
    apart = torch.where(beyond, (reference.float() - stored.float()).abs().nan_to_num(torch.inf), 0.0)
    place = int(apart.reshape(-1).argmax())
    values = (format_number(float(t.reshape(-1)[place])) for t in (stored, reference))
    index = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(place), stored.shape))
    here, there = values
    return (
        f"differs in {count} of {stored.numel()} elements: [{index}] is {here}, and {there} in the reference"
    )


class _Content:
    """Finds weights by content."""

    def __init__(self, graph: ComparedGraph) -> None:
        self._graph = graph
        self._by_size: defaultdict[int, list[fx.Node]] = defaultdict(list)
        for node, tensor in graph.weights.items():
            self._by_size[tensor.numel()].append(node)
        self._samples: dict[tuple[fx.Node, bool], torch.Tensor] = {}

    def find(self, tensor: torch.Tensor) -> MatchedWeight | None:
        """Return the weight with the same elements, in the same order or transposed."""
        samples, nodes = samples_of(tensor), self._by_size[tensor.numel()]
        candidates = [(node, False) for node in nodes]
        candidates += [(node, True) for node in nodes if self._graph.weights[node].ndim == 2]
        for node, transposed in candidates:
            if agreement(self._sampled(node, transposed), samples) < 0.01:
                other = self._graph.weights[node]
                other = other.t() if transposed else other
                if _rounded_alike(other.reshape(tensor.shape), tensor):
                    return MatchedWeight(node, transposed)
        return None

    def _sampled(self, node: fx.Node, transposed: bool) -> torch.Tensor:
        if (node, transposed) not in self._samples:
            weight = self._graph.weights[node]
            self._samples[node, transposed] = samples_of(weight.t() if transposed else weight)
        return self._samples[node, transposed]


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An op that computes or selects values; views and casts are not ops of their own."""

    place: int  # position in the graph's order
    node: fx.Node
    site: Site
    base: str
    operands: tuple[fx.Node, ...]  # nodes that it reads
    sources: tuple[fx.Node, ...]  # the op or placeholder that computed the values of each operand

    @property
    def name(self) -> tuple[str, str]:
        """Layer (for ONNX, the node) and kind of the op."""
        return self.site.layer, self.base


class ComparedGraph:
    """The ops of a graph with the values of one FP32 run."""

    def __init__(self, executor: LockStep, values: Values) -> None:
        traced = executor.program.traced
        self.traced = traced
        self.places: dict[str, Placeholder] = {p.node: p for p in traced.placeholders}
        self.masters = executor.converted.masters
        self.values = values.samples
        self.inputs = [n for n in executor.program.inputs if self.places[n.name].slot is Slot.INPUT]
        self.outputs = dict(zip(traced.outputs, executor.program.outputs, strict=True))
        sites = traced.site_of_node
        self._sources: dict[fx.Node, fx.Node] = {}
        self.ops: dict[fx.Node, Op] = {}
        for node in traced.graph.nodes:
            site = sites.get(node.name)
            read = tuple(node.all_input_nodes)
            transparent = node.op == "call_function" and (site is None or site.role in _TRANSPARENT_ROLES)
            self._sources[node] = self._sources[read[0]] if transparent and read else node
            if node.op == "call_function" and site is not None and not transparent:
                sources = tuple(self._sources[n] for n in read)
                self.ops[node] = Op(len(self.ops), node, site, _base(node), read, sources)

    def source(self, node: fx.Node) -> fx.Node:
        """Return the op or placeholder whose values a node has."""
        return self._sources[node]

    @cached_property
    def readers(self) -> dict[fx.Node, list[Op]]:
        """The ops that read an op or placeholder, directly or through views."""
        by_source: defaultdict[fx.Node, list[Op]] = defaultdict(list)
        for op in self.ops.values():
            for source in dict.fromkeys(op.sources):
                by_source[source].append(op)
        return by_source

    @cached_property
    def weights(self) -> dict[fx.Node, torch.Tensor]:
        """The floating-point tensors of the model that an op reads, by placeholder."""
        return {
            node: self.masters[node.name].detach()
            for node in self.traced.graph.find_nodes(op="placeholder")
            if node.users and node.name in self.masters and self.masters[node.name].is_floating_point()
        }

    @cached_property
    def numbers(self) -> frozenset[float]:
        """The numbers that ops are called with."""
        values = (value for op in self.ops.values() for value in self.arguments(op).values())
        return frozenset(value for value in values if isinstance(value, float))

    def is_constant(self, op: Op) -> bool:
        """Return whether an op computes a single number from stored ones."""
        stored = all(source.name in self.masters for source in op.sources)
        return stored and self.values[op.node][0] == 1

    def weight_name(self, node: fx.Node) -> str:
        """Return the name of the parameter, buffer or constant of a placeholder."""
        return self.places[node.name].name

    def arguments(self, op: Op) -> dict[str, Any]:
        """Return the arguments of an op by name, with single stored numbers as numbers."""
        overload = overload_of(op.node.target)
        if overload is None:
            return {}
        arguments = named_arguments(overload, op.node.args, dict(op.node.kwargs))
        return {name: self._number(value) for name, value in arguments.items()}

    def _number(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            tensor = self.masters.get(self.source(value).name)
            if tensor is not None and tensor.numel() == 1:
                return tensor.item()
        return value


def _base(node: fx.Node) -> str:
    overload = overload_of(node.target)
    name = base_name(overload).rstrip("_") if overload is not None else str(node.target)
    return _KINDS.get(name, synonyms(name)[0])


class Values(Observer):
    """Samples elements of every tensor of a run, at positions that do not depend on its shape."""

    __slots__ = ("samples",)

    def __init__(self, executor: LockStep, inputs: list[torch.Tensor]) -> None:
        # number of elements and a sample of them, by node
        self.samples: dict[fx.Node, tuple[int, torch.Tensor]] = {}
        remaining = iter(inputs)
        for node in executor.program.inputs:
            master = executor.converted.masters.get(node.name)
            self._keep(node, next(remaining) if master is None else master.detach())

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Keep elements of FP32's value."""
        self._keep(step.node, reference)
        return value

    def _keep(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor) and not value.is_complex():
            self.samples[node] = value.numel(), samples_of(value)


def samples_of(value: torch.Tensor) -> torch.Tensor:
    """Return elements at positions that depend only on their number, in float64 on the CPU."""
    count = value.numel()
    if count <= _MAX_SAMPLED:
        return value.detach().reshape(-1).to("cpu", torch.float64)
    places = torch.arange(_MAX_SAMPLED, dtype=torch.int64) * (count - 1) // (_MAX_SAMPLED - 1)
    if value.is_contiguous():
        return value.detach().reshape(-1)[places.to(value.device)].to("cpu", torch.float64)
    index = torch.unravel_index(places.to(value.device), value.shape)
    return value.detach()[index].to("cpu", torch.float64)


def agreement(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the mean relative error of two samples, at most 1.

    Errors of relatively small elements are measured against the median, so that neither masks nor the
    remainders of sums that cancel dominate. Infinities must agree.
    """
    if first.shape != second.shape:
        return 1.0
    if torch.equal(first, second):
        return 0.0
    size = first.abs().nan_to_num(0.0, 0.0, 0.0)
    usual = float(size.median()) or float(size.mean()) or 1.0
    apart = (first - second).abs() / (size + usual)
    same = (first == second) | (first.isnan() & second.isnan())
    return float(torch.where(same, 0.0, apart.nan_to_num(1.0, 1.0, 1.0)).clamp(max=1.0).mean())


def plain_value(value: Any) -> Any:
    """Return a number, a text, or a list of these; ``None`` for anything else."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(v, bool | int | float | str) for v in value):
        return list(value)
    return None
