"""Bounds every value of a graph over a whole domain of inputs, in one walk."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.bounds import elementwise, functions, norms, products, reductions, shapes
from ampaudit.bounds import indexing as elements
from ampaudit.bounds.interval import Interval, between, symmetric
from ampaudit.bounds.shapes import without_visible_writes, written_memory
from ampaudit.bounds.stored import UNIT_ROUNDOFF, any_value, format_of, stored
from ampaudit.bounds.table import Bound, BoundTable
from ampaudit.bounds.transfers import TRANSFERS, OpCall, RegisteredTransfer, arguments_of
from ampaudit.bounds.weights import KnownWeights
from ampaudit.core.assumptions import Assumption
from ampaudit.core.formats import NumberFormat
from ampaudit.core.sites import SiteId
from ampaudit.trace.functional import WriteThrough, overload_of
from ampaudit.trace.graph import Placeholder, Role, Slot, TracedModel
from ampaudit.trace.opnames import CAST_OPS, base_name
from ampaudit.trace.values import UNKNOWN_SIZE, SharedMemory, sizes_of

__all__ = ["bound"]

_REGISTERED = (elements, elementwise, functions, norms, products, reductions, shapes)


def bound(traced: TracedModel, domain: Mapping[str, Assumption], form: NumberFormat) -> BoundTable:
    """Bound every site of a graph.

    A value of an op in 16 bits that is not proved is taken to lie within the format from there on: were it
    not, it would be infinite, and that is the fault of its site alone. So a proof says: as long as nothing
    before it has overflowed, this site does not.

    Args:
        traced: the graph, with its weights.
        domain: ranges of the inputs, by placeholder.
        form: the 16-bit format of the run.
    """
    with torch.no_grad():
        return _BoundPass(traced, domain, form).run()


class _BoundPass:
    """One walk through a graph without writes in place.

    Args:
        traced: the graph.
        domain: ranges of its inputs.
        form: the 16-bit format.
    """

    def __init__(self, traced: TracedModel, domain: Mapping[str, Assumption], form: NumberFormat) -> None:
        self._memory = SharedMemory(traced.graph)
        self._traced = without_visible_writes(traced, self._memory)
        self._domain = domain
        self._form = form
        self._sites = traced.site_of_node
        self._weights = KnownWeights()
        self._intervals = _Intervals(self._weights)
        self._bounds: dict[SiteId, Bound] = {}
        self._uncovered: dict[str, None] = {}
        self._failed: dict[str, None] = {}
        # values of these memories change between calls, or behind the graph's back
        in_place, self._hidden = written_memory(traced.graph, self._memory)
        self._written = in_place | self._hidden

    def run(self) -> BoundTable:
        places = {place.node: place for place in self._traced.placeholders}
        for node in self._traced.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, places[node.name])
            elif node.op == "call_function":
                self._call(node)
        return BoundTable(
            self._bounds,
            {node.name: found for node, found in self._intervals.items()},
            tuple(self._domain.values()),
            tuple(sorted(self._uncovered)),
            tuple(self._failed),
        )

    def _placeholder(self, node: fx.Node, place: Placeholder) -> None:
        value = node.meta["val"]
        shape, dtype = sizes_of(value), value.dtype
        changed = self._hidden if place.slot is Slot.INPUT else self._written
        if changed and not changed.isdisjoint(self._memory.of(value)):
            self._intervals[node] = any_value(shape, dtype)
        elif place.slot is Slot.INPUT:
            given = self._domain[node.name]
            self._intervals[node] = stored(between(shape, given.low, given.high), dtype)
        else:
            tensor = self._traced.tensors[node.name].detach()
            self._weights.given(node, tensor, dtype, constant=place.slot is not Slot.PARAMETER)

    def _call(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem:
            source, index = node.args
            items = self._intervals[source]  # type: ignore[index]
            known = isinstance(items, list) and isinstance(index, int)
            self._intervals[node] = items[index] if known else _unknown(value)
            return
        op = overload_of(node.target)
        entry = TRANSFERS.get(op) if op is not None else None
        hidden = bool(self._hidden) and not self._hidden.isdisjoint(self._memory.of(value))
        if entry is not None and not hidden and self._weights.follow(node, entry):
            self._prove(node, [self._weights.peak(node)])
            return
        found = _unknown(value) if hidden else self._transferred(node, op, entry)
        intervals = found if isinstance(found, list) else [found]
        self._prove(node, [interval.peak for interval in intervals])
        if entry is None or not entry.moves:
            exact = entry is not None and entry.exact and base_name(op) not in CAST_OPS
            intervals = [_kept(s, d, exact=exact) for s, d in zip(intervals, _dtypes(value), strict=False)]
        self._intervals[node] = intervals if isinstance(found, list) else intervals[0]

    def _transferred(
        self, node: fx.Node, op: OpOverload | None, entry: RegisteredTransfer | None
    ) -> Interval | list[Interval]:
        value = node.meta.get("val")
        if isinstance(node.target, WriteThrough):
            return self._hull(node)
        shapes = [sizes_of(item) for item in _items(value)]
        taken = {size for source in node.all_input_nodes for size in self._sizes(source)}
        varies = UNKNOWN_SIZE in taken or any(UNKNOWN_SIZE in shape for shape in shapes)
        if op is None or entry is None or not shapes or varies:
            return self._cover(str(op or node.target), value)
        if all(0 in shape for shape in shapes):
            zeros = [symmetric(shape, 0.0) for shape in shapes]
            return zeros if isinstance(value, list | tuple) else zeros[0]
        if 0 in taken and not entry.empty:
            return _unknown(value)
        if not entry.integers and not any(d is None or d.is_floating_point for d in _dtypes(value)):
            return _unknown(value)
        call = OpCall(
            node, op, arguments_of(op, node), self._intervals, self._weights, self._form.max, shapes
        )
        try:
            found = entry.function(call)
        except (ArithmeticError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            self._failed[f"{op}: {error}"] = None
            return self._cover(str(op), value)
        if call.unread:
            return self._cover(f"{op} with {', '.join(call.unread)}", value)
        if not _fits(found, shapes, several=isinstance(value, list | tuple)):
            self._failed[f"{op}: an interval does not fit the value"] = None
            return self._cover(str(op), value)
        return found

    def _sizes(self, node: fx.Node) -> Iterable[int]:
        found = self._intervals.get(node)
        if isinstance(found, list):
            return [size for interval in found for size in interval.shape]
        return self._weights[node].tensor.shape if found is None else found.shape

    def _cover(self, name: str, value: Any) -> Interval | list[Interval]:
        """Count an uncovered op, if it computes numbers that could overflow."""
        if any(item.is_floating_point() or item.is_complex() for item in _items(value)):
            self._uncovered[name] = None
        return _unknown(value)

    def _hull(self, node: fx.Node) -> Interval:
        """Bound a partly written value by the ends of both."""
        value = node.meta["val"]
        if any(source.meta["val"].dtype is not value.dtype for source in node.all_input_nodes):
            return any_value(sizes_of(value), value.dtype)  # bytes of numbers
        both = [self._intervals[source] for source in node.all_input_nodes]
        filled = [interval for interval in both if isinstance(interval, Interval) and 0 not in interval.shape]
        low = min((float(interval.low.amin()) for interval in filled), default=0.0)
        high = max((float(interval.high.amax()) for interval in filled), default=0.0)
        return between(sizes_of(value), low, high)

    def _prove(self, node: fx.Node, peaks: list[float]) -> None:
        site = self._sites.get(node.name)
        if site is None or site.dtype is None:
            return
        form = format_of(site.dtype)
        peak = max(peaks, default=0.0)
        computed = peak * (1 + 8 * UNIT_ROUNDOFF)
        limit = form.overflow_at if form is not None else math.inf
        if site.role in (Role.VIEW, Role.SELECT):  # no new values
            limit = math.inf if math.isfinite(peak) else limit
        self._bounds[site.id] = Bound(computed, bool(computed < limit), self._inside(node))

    def _inside(self, node: fx.Node) -> float | None:
        """Bound the squares inside a norm: (x - mean)^2 by the squared spread, x^2 by the squared peak."""
        op = overload_of(node.target)
        name = base_name(op) if op is not None else ""
        if name not in norms.CENTRED and name not in norms.PLAIN:
            return None
        x = self._intervals[node.all_input_nodes[0]]
        if not isinstance(x, Interval) or 0 in x.shape:
            return None
        reach = float(x.high.amax() - x.low.amin()) if name in norms.CENTRED else x.peak
        return reach * reach * (1 + 2.0**-7)


class _Intervals(dict[fx.Node, Any]):
    """Intervals by node; those of weights are computed when they are needed."""

    def __init__(self, weights: KnownWeights) -> None:
        super().__init__()
        self._weights = weights

    def __missing__(self, node: fx.Node) -> Interval:
        self[node] = found = self._weights.interval(node)
        return found


def _kept(interval: Interval, dtype: torch.dtype | None, *, exact: bool) -> Interval:
    """Return the result as stored; one that only rearranges its inputs is not rounded again."""
    form = format_of(dtype)
    if not exact or form is None:
        return stored(interval, dtype)
    return interval if interval.peak <= form.max else interval.clipped(form.max)


def _fits(found: Interval | list[Interval], shapes: list[tuple[int, ...]], *, several: bool) -> bool:
    """Return whether the intervals match the number and shapes of the values, with ordered ends."""
    intervals = found if isinstance(found, list) else [found]
    if [interval.shape for interval in intervals] != shapes or isinstance(found, list) != several:
        return False
    return all(map(_sound, intervals))


def _sound(interval: Interval) -> bool:
    for ends in (interval.low, interval.high, *interval.norms.values(), *interval.sums.values()):
        if ends.ndim != len(interval.shape):
            return False
        if any(n not in (1, m) for n, m in zip(ends.shape, interval.shape, strict=True)):
            return False
    return bool((interval.low <= interval.high).all())


def _unknown(value: Any) -> Interval | list[Interval]:
    items = [any_value(sizes_of(item), item.dtype) for item in _items(value)]
    return items if isinstance(value, list | tuple) else (items or [symmetric((), math.inf)])[0]


def _items(value: Any) -> Iterator[torch.Tensor]:
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, torch.Tensor):
            yield item


def _dtypes(value: Any) -> list[torch.dtype | None]:
    return [item.dtype for item in _items(value)] or [None]
