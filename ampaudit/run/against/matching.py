"""Matches the ops of two graphs: by value and name, then by what they read."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher

import torch
from torch import fx

from ampaudit.run.against.graph import ComparedGraph, Op
from ampaudit.run.against.values import agreement
from ampaudit.run.against.weights import MatchedWeight
from ampaudit.trace.graph import Slot

__all__ = ["Matching"]


class Matching:
    """The ops of an audited graph that correspond to ops of a reference.

    Two ops correspond if they compute the same values on the batch; each has one partner, preferably of the
    same name or kind. Ops whose values differ correspond if they are of the same kind and read corresponding
    values, or appear in the same order.

    ``inputs`` are pairs of input placeholders, the audited one first; values agree up to the relative
    ``tolerance``.

    Attributes:
        partner: Partners of the audited ops.
        agreeing: Nodes of the audited graph, including views, with a value that occurs in the reference.
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
        self.partner: dict[Op, Op] = {}
        self._matched: set[Op] = set()
        self._same = dict(inputs) | {node: match.other for node, match in weights.items()}
        self._index = _Index(reference, tolerance)
        self._equal: dict[fx.Node, list[fx.Node]] = {}
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
