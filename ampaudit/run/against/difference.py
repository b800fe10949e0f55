"""Finds where a graph computes something else than a reference, and what differs there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from ampaudit.core.text import format_number, short_op
from ampaudit.run.against.comparison import ModelDifference
from ampaudit.run.against.graph import ComparedGraph, Op
from ampaudit.run.against.matching import Matching
from ampaudit.run.against.values import plain_value
from ampaudit.run.against.weights import LEAST_CLAMPED, MatchedWeight, difference_of
from ampaudit.trace.graph import Site

__all__ = ["model_differences"]

_SMALLEST = {torch.float16: 1.2e-7}  # what converters replace smaller numbers by
_JUMP = 4
_TRANSPOSED = "is transposed"
_IDENTITIES = frozenset(
    "dropout feature_dropout alpha_dropout clone contiguous alias detach lift_fresh".split()
)
_NEUTRAL = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0, "pow": 1.0}
_NUMBERS_ONLY = ("eps", "other", "exponent", "min", "max", "value", "alpha", "beta", "scale", "self")


def model_differences(
    found: Matching,
    weights: Mapping[fx.Node, MatchedWeight],
    dtype: torch.dtype,
    wrong: Mapping[str, fx.Node],
) -> list[ModelDifference]:
    """Return what differs, in graph order; ops that compute something else only where outputs are wrong.

    Args:
        found: the matched graphs.
        weights: the matched weights.
        dtype: the 16-bit dtype, which rounds constants.
        wrong: outputs of the audited graph that differ, by name.
    """
    search = _Search(found, weights, dtype)
    structural = {(d.kind, d.place): d for d in search.structural()}
    roots: dict[Op, list[str]] = {}
    changed = {key[1] for key in structural}
    for name, node in wrong.items():
        for op in search.roots(node):
            sources = (found.audited.ops.get(source) for source in op.sources)
            candidates = (o for o in (op, *sources) if o is not None and o.site.id in changed)
            roots.setdefault(next(candidates, op), []).append(name)
    result = dict(structural)
    for op, names in roots.items():
        known = [key for key in structural if key[1] == op.site.id]
        for key in known:
            d = structural[key]
            result[key] = ModelDifference(d.kind, d.site, d.counterpart, d.what, tuple(names))
        if not known:
            made = search.explained(op, tuple(names))
            result[made.kind, made.place] = made
    order = {op.site.id: op.place for op in found.audited.ops.values()}
    return sorted(result.values(), key=lambda d: (not d.outputs, order.get(d.place, math.inf)))


class _Search:
    def __init__(self, found: Matching, weights: Mapping[fx.Node, MatchedWeight], dtype: torch.dtype) -> None:
        self._found = found
        self._weights = weights
        self._dtype = dtype

    def structural(self) -> Iterator[ModelDifference]:
        """Yield constants, weights and ops that differ, whether or not it shows."""
        yield from self._missing()
        for op, other in self._found.partner.items():
            if op.base == other.base and (what := self._constants(op, other)):
                yield ModelDifference("constant", op.site, other.site, what)
            if what := self._other_weight(op, other):
                yield ModelDifference("weight", op.site, other.site, what)
        for op in self._found.audited.ops.values():
            for source in op.sources:
                match = self._weights.get(source)
                if match is not None and match.what and not match.clamped and match.what != _TRANSPOSED:
                    name = self._found.audited.weight_name(source)
                    partner = self._found.partner.get(op)
                    site = None if partner is None else partner.site
                    yield ModelDifference("weight", op.site, site, f"{name} {match.what}")

    def _other_weight(self, op: Op, other: Op) -> str:
        """Describe a weight without a counterpart in place of one of the reference."""
        here, there = self._found.audited, self._found.reference
        known = {self._weights[s].other for s in op.sources if s in self._weights}
        free = [s for s in other.sources if s in there.weights and s not in known]
        for source in op.sources:
            tensor = here.weights.get(source)
            if tensor is None or source in self._weights or tensor.numel() < 2:
                continue
            for same in (s for s in free if there.weights[s].shape == tensor.shape):
                return f"{here.weight_name(source)} {difference_of(there.weights[same], tensor)}"
        return ""

    def roots(self, output: fx.Node) -> list[Op]:
        """Return the ops before an output at which values begin to differ."""
        graph = self._found.audited
        first = graph.ops.get(graph.source(output))
        pending, seen = [first] if first is not None else [], set()
        roots: list[Op] = []
        while pending:
            op = pending.pop()
            if op in seen:
                continue
            seen.add(op)
            sources = (graph.ops.get(source) for source in op.sources)
            before = [o for o in sources if o is not None and not self._found.agrees(o)]
            pending += before
            if not before and self._jumps(op):
                roots.append(op)
        graph = self._found.audited
        varying = [op for op in roots if not graph.is_constant(op)]
        return sorted({self._suspect(op, seen) for op in varying or roots}, key=lambda op: op.place)

    def _jumps(self, op: Op) -> bool:
        """Return whether an op adds most of its error itself; otherwise rounding has added up."""
        sources = (self._found.audited.ops.get(source) for source in op.sources)
        before = max((self._found.error(o) for o in sources if o is not None), default=0.0)
        return self._found.error(op) > _JUMP * before

    def _suspect(self, op: Op, bad: set[Op]) -> Op:
        """Return the op to name: in a part without counterparts, the one whose weight is another."""
        if self._found.audited.is_constant(op):
            return op
        region = [op]
        while region[-1] not in self._found.partner:
            following = [r for r in self._found.audited.readers.get(region[-1].node, ()) if r in bad]
            if not following:
                break
            region.append(following[0])
        for each in region:
            unknown = (s for s in each.sources if s in self._found.audited.weights and s not in self._weights)
            if any(self._found.audited.weights[s].numel() > 1 for s in unknown) or self._weight(each):
                return each
        if region[-1] in self._found.partner and self._stray(op) is None:
            return region[-1]
        return op

    def _weight(self, op: Op) -> str:
        """Describe a weight of an op that is another, or stored as only another kind of op takes it."""
        graph = self._found.reference
        for source in op.sources:
            match = self._weights.get(source)
            if match is None:
                continue
            shape, readers = graph.weights[match.other].shape, graph.readers.get(match.other, ())
            flipped = op.base == "matmul" and source in op.operands and not match.transposed
            flipped &= len(set(shape)) == 1 < len(shape) and all(r.base == "linear" for r in readers)
            if match.what or flipped:
                return f"{graph.weight_name(match.other)} {match.what or _TRANSPOSED}"
        return ""

    def explained(self, op: Op, outputs: tuple[str, ...]) -> ModelDifference:
        """Describe an op that computes something else from inputs that agree."""
        other = self._found.partner.get(op)
        site = None if other is None else other.site
        if what := self._weight(op):
            matches = [self._weights[s] for s in op.sources if s in self._weights]
            clamped = any(match.clamped for match in matches)
            return ModelDifference("clamped" if clamped else "weight", op.site, site, what, outputs)
        view = self._stray(op) if other is None else self._view(op, other)
        if view is not None:
            return ModelDifference("value", view, site, "it arranges the elements differently", outputs)
        if other is None:
            what = "no op of the reference computes its value"
        else:
            what = self._arguments(op, other) or self._operator(op, other) or "it computes other values"
        clamped = other is not None and self._clamped(op, other)
        return ModelDifference("clamped" if clamped else "value", op.site, site, what, outputs)

    def _clamped(self, op: Op, other: Op) -> bool:
        """Return whether a number that the format lacks is another large one, as in masks."""
        here, there = self._found.audited.arguments(op), self._found.reference.arguments(other)
        pairs = [(here[n], there[n]) for n in here.keys() & there.keys() & set(_NUMBERS_ONLY)]
        known = [(float(a), float(b)) for a, b in pairs if _is_number(a) and _is_number(b) and a != b]
        return bool(known) and all(a < 0 and self._rounded(a, b) for a, b in known)

    def _view(self, op: Op, other: Op) -> Site | None:
        """Return the view of an operand that has the elements of the reference's in another order."""
        for here, there in zip(op.operands, other.operands, strict=False):
            source = self._found.audited.source(here)
            moved = source is not here and not self._found.same_value(there, here)
            if moved and self._found.source(source) is self._found.reference.source(there):
                return self._first_view(here)
        return None

    def _stray(self, op: Op) -> Site | None:
        """Return the view of an operand whose elements the reference has nowhere in that order."""
        for here in op.operands:
            source = self._found.audited.source(here)
            if source is not here and source in self._found.audited.ops and here not in self._found.agreeing:
                return self._first_view(here)
        return None

    def _first_view(self, node: fx.Node) -> Site | None:
        """Return the first of the views before a value that arranges elements as the reference never does."""
        sites = self._found.audited.traced.site_of_node
        views = list(_chain(node, self._found.audited.source(node)))[::-1]
        named = [view for view in views if view.name in sites]
        stray = (sites[view.name] for view in named if view not in self._found.agreeing)
        return next(stray, sites[named[0].name] if named else None)

    def _operator(self, op: Op, other: Op) -> str:
        """Describe another kind of op."""
        if op.base == other.base:
            return ""
        return f"it computes {op.base}, and the reference {other.base}"

    def _missing(self) -> Iterator[ModelDifference]:
        """Yield ops that pass their input on almost unchanged here, and that the audited graph lacks."""
        found = self._found
        back = {other: op for op, other in found.partner.items()}
        for other in found.only_reference:
            if other.base in _IDENTITIES or _is_identity(found.reference, other):
                continue
            given = [s for n, s in zip(other.operands, other.sources, strict=True) if self._close(n, other)]
            for reader in found.reference.readers.get(other.node, ()):
                here = back.get(reader)
                if here is None or not given:
                    continue
                sources = [found.source(source) for source in here.sources]
                if other.node in sources or not (set(given) & set(sources) or self._reads(here, given)):
                    continue
                yield ModelDifference("missing", here.site, other.site, _call(found.reference, other))
                break

    def _reads(self, op: Op, given: list[fx.Node]) -> bool:
        """Return whether an op reads the value of a node of the reference."""
        return any(self._found.same_value(g, n) for g in given for n in op.operands)

    def _close(self, node: fx.Node, op: Op) -> bool:
        values = self._found.reference.values
        first, second = values.get(node), values.get(op.node)
        if first is None or second is None or first[0] != second[0]:
            return False
        difference = (first[1] - second[1]).abs()
        return bool((difference <= 1e-3 * first[1].abs() + 1e-5).all())

    def _constants(self, op: Op, other: Op) -> str:
        """Describe numbers that differ by more than rounding, of ops that take them in the same places."""
        here, there = (
            graph.arguments(o) for graph, o in ((self._found.audited, op), (self._found.reference, other))
        )
        for name in here.keys() & there.keys():
            first, second = here[name], there[name]
            numbers = name in _NUMBERS_ONLY and _is_number(first) and _is_number(second)
            if numbers and not self._rounded(float(first), float(second)):
                return f"{name} is {_shown(float(first))}, and {_shown(float(second))} in the reference"
        return ""

    def _rounded(self, here: float, there: float) -> bool:
        if here == there or (math.isnan(here) and math.isnan(there)):
            return True
        if abs(there) > torch.finfo(self._dtype).max and here * there > 0:
            return abs(here) >= LEAST_CLAMPED or abs(here - there) <= 1e-6 * abs(there)
        if here == 0.0:
            return False
        smallest = _SMALLEST.get(self._dtype, 0.0) if abs(there) >= 1e-7 else 0.0
        return abs(here - there) <= 2 * torch.finfo(self._dtype).eps * abs(there) + smallest

    def _arguments(self, op: Op, other: Op) -> str:
        """Describe arguments that differ."""
        if op.base != other.base:
            return ""
        here, there = self._found.audited.arguments(op), self._found.reference.arguments(other)
        for name in [n for n in here if n in there]:
            first, second = plain_value(here[name]), plain_value(there[name])
            if first is not None and second is not None and first != second:
                return f"{name} is {_shown(first)}, and {_shown(second)} in the reference"
        return ""


def _chain(node: fx.Node, source: fx.Node) -> Iterator[fx.Node]:
    """Yield the views from a value back to what made it."""
    while node is not source:
        yield node
        node = node.all_input_nodes[0]


def _is_identity(graph: ComparedGraph, op: Op) -> bool:
    """Return whether an op changes nothing, whatever its input is."""
    neutral = _NEUTRAL.get(op.base)
    other = graph.arguments(op).get("exponent" if op.base == "pow" else "other")
    return neutral is not None and _is_number(other) and other == neutral


def _call(graph: ComparedGraph, op: Op) -> str:
    """Return an op with its numbers, as in ``add(1e-08)``."""
    numbers = [format_number(float(v)) for v in graph.arguments(op).values() if isinstance(v, float)]
    return (
        f"{short_op(op.site.op).split('.')[0]}({', '.join(numbers[:3])})" if numbers else short_op(op.site.op)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    return format_number(value) if isinstance(value, float) else str(value)
