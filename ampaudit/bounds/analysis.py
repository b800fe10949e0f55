"""Bounds every value of a graph over a whole domain of inputs, in one walk."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.bounds import elementwise, products, reductions, shapes
from ampaudit.bounds.interval import Interval, between, from_tensor, hull, symmetric
from ampaudit.bounds.shapes import without_visible_writes, written_memory
from ampaudit.bounds.stored import (
    UNIT_ROUNDOFF,
    any_value,
    can_represent,
    converted,
    format_of,
    stored,
    widened_once,
)
from ampaudit.bounds.transfers import (
    TRANSFERS,
    VANISHING,
    KnownTensor,
    OpCall,
    RegisteredTransfer,
    arguments_of,
)
from ampaudit.core.assumptions import Assumption, parse_assumption
from ampaudit.core.errors import InputError, UsageError, did_you_mean
from ampaudit.core.formats import NumberFormat
from ampaudit.core.sites import SiteId
from ampaudit.trace.functional import WriteThrough, overload_of
from ampaudit.trace.graph import Placeholder, Role, Slot, TracedModel
from ampaudit.trace.opnames import (
    CAST_OPS,
    base_name,
    may_write,
    mutated_arguments,
    written_arguments,
    written_values,
)
from ampaudit.trace.values import LOW_PRECISION_DTYPES, UNKNOWN_SIZE, SharedMemory, sizes_of, tensors_in

MAX_COMPUTED = 1 << 22  # elements up to which a constant is computed
_REGISTERED = (elementwise, products, reductions, shapes)


def bound(traced: TracedModel, domain: Mapping[str, Assumption], form: NumberFormat) -> BoundTable:
    """Bound every site of a graph for inputs in a domain, which has their ranges by placeholder.

    Where a site is not proved, later sites assume that its value lies within the format, since an overflow
    there is the fault of that site alone. So a proof says that a site does not overflow unless an earlier one
    does.
    """
    with torch.no_grad():
        return _BoundPass(traced, domain, form).run()


class _BoundPass:
    """One walk through a graph without writes in place."""

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
        # memory whose values change between calls, or by writes that the graph does not show
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
            {node.name: interval for node, interval in self._intervals.items()},
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
            assumption = self._domain[node.name]
            stated = between(shape, assumption.low, assumption.high)
            # beyond its format, an input is infinite, which is the fault of the ops that read it
            self._intervals[node] = (
                converted(stated, torch.float64, dtype) if format_of(dtype) else stored(stated, dtype)
            )
        else:
            tensor = self._traced.tensors[node.name].detach()
            self._weights.add_placeholder(node, tensor, dtype, constant=place.slot is not Slot.PARAMETER)

    def _call(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.target is operator.getitem:
            source, index = node.args
            items = self._intervals[source]  # type: ignore[index]
            indexable = isinstance(items, list) and isinstance(index, int)
            self._intervals[node] = items[index] if indexable else _unknown(value)
            return
        op = overload_of(node.target)
        entry = TRANSFERS.get(op) if op is not None else None
        hidden = bool(self._hidden) and not self._hidden.isdisjoint(self._memory.of(value))
        if entry is not None and not hidden and self._weights.follow(node, entry):
            self._prove(node, [self._weights.peak(node)])
            return
        result = _unknown(value) if hidden else self._apply_transfer(node, op, entry)
        intervals = result if isinstance(result, list) else [result]
        self._prove(node, [*(interval.peak for interval in intervals), *self._statistics(node, op)])
        if entry is None or not entry.moves:
            exact = entry is not None and entry.exact and base_name(op) not in CAST_OPS
            intervals = [
                _as_stored(s, d, exact=exact) for s, d in zip(intervals, _dtypes(value), strict=False)
            ]
        self._intervals[node] = intervals if isinstance(result, list) else intervals[0]

    def _statistics(self, node: fx.Node, op: OpOverload | None) -> list[float]:
        """Bound the running statistics that a norm writes, which its schema does not show.

        Each is a weighted mean of its old value and of the batch's statistic, so the larger one bounds it.
        """
        kwargs = dict(node.kwargs)
        if op is None or set(written_arguments(op, node.args, kwargs)) <= set(mutated_arguments(op)):
            return []
        arguments = arguments_of(op, node)
        statistics = [value for name in ("running_mean", "running_var") if (value := arguments.get(name))]
        if _dtypes(node.meta.get("val"))[0] in LOW_PRECISION_DTYPES and any(
            each.meta["val"].dtype is torch.float32 for each in statistics
        ):
            return []  # a run does not measure them as values of the site
        first, momentum = node.all_input_nodes[0], arguments.get("momentum")
        x = self._intervals.get(first)
        size = math.prod(x.shape) // max(x.shape[1], 1) if isinstance(x, Interval) and len(x.shape) > 1 else 0
        once = base_name(op) == "batch_norm" and all(map(self._has_one_writer, statistics))
        convex = isinstance(momentum, int | float) and 0 <= momentum <= 1
        if not (once and convex and isinstance(x, Interval) and size > 1):
            return [math.inf]
        peaks = [x.peak, x.peak * x.peak * size / (size - 1)]
        peaks += [self._weights.peak_of(self._traced.tensors[each.name]) for each in statistics]
        return [peak * (1 + 2.0**-7) for peak in peaks]

    def _has_one_writer(self, statistic: fx.Node) -> bool:
        """Return whether a statistic is a buffer of the model to which only one op writes."""
        memory = self._memory.of(statistic.meta["val"])
        return statistic.name in self._traced.tensors and all(self._writers[each] < 2 for each in memory)

    @cached_property
    def _writers(self) -> Counter[int]:
        """How many ops write to each memory."""
        writers: Counter[int] = Counter()
        for node in self._traced.graph.nodes:
            op = overload_of(node.target)
            if op is not None and may_write(op):
                written = written_values(op, node.args, dict(node.kwargs))
                values = [value.meta.get("val") for value in written if isinstance(value, fx.Node)]
                writers.update(frozenset().union(*map(self._memory.of, values)))
        return writers

    def _apply_transfer(
        self, node: fx.Node, op: OpOverload | None, entry: RegisteredTransfer | None
    ) -> Interval | list[Interval]:
        value = node.meta.get("val")
        if isinstance(node.target, WriteThrough):
            return self._union(node)
        shapes = [sizes_of(item) for item in tensors_in(value)]
        input_sizes = {size for source in node.all_input_nodes for size in self._sizes(source)}
        varies = UNKNOWN_SIZE in input_sizes or any(UNKNOWN_SIZE in shape for shape in shapes)
        if op is None or entry is None or not shapes:
            return self._uncovered_op(str(op or node.target), value)
        if varies:
            return self._uncovered_op(f"{op} of a size that depends on data", value)
        if all(0 in shape for shape in shapes):
            zeros = [symmetric(shape, 0.0) for shape in shapes]
            return zeros if isinstance(value, list | tuple) else zeros[0]
        if 0 in input_sizes and not entry.empty:
            return _unknown(value)
        if not entry.integers and not any(d is None or d.is_floating_point for d in _dtypes(value)):
            return _unknown(value)
        call = OpCall(
            node, op, arguments_of(op, node), self._intervals, self._weights, self._form.max, shapes
        )
        try:
            result = entry.function(call)
        except (ArithmeticError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            self._failed[f"{op}: {error}"] = None
            return self._uncovered_op(str(op), value)
        if call.unread and any(each.bounded for each in (result if isinstance(result, list) else [result])):
            return self._uncovered_op(f"{op} with {', '.join(call.unread)}", value)
        if not _fits(result, shapes, several=isinstance(value, list | tuple)):
            self._failed[f"{op}: an interval does not fit the value"] = None
            return self._uncovered_op(str(op), value)
        return result

    def _sizes(self, node: fx.Node) -> Iterable[int]:
        bounds = self._intervals.get(node)
        if isinstance(bounds, list):
            return [size for interval in bounds for size in interval.shape]
        return self._weights[node].tensor.shape if bounds is None else bounds.shape

    def _uncovered_op(self, name: str, value: Any) -> Interval | list[Interval]:
        """Return unknown intervals, and note the op if it computes numbers that could overflow."""
        if any(item.is_floating_point() or item.is_complex() for item in tensors_in(value)):
            self._uncovered[name] = None
        return _unknown(value)

    def _union(self, node: fx.Node) -> Interval:
        """Bound a partly overwritten value by the ends of the old and the written one."""
        value = node.meta["val"]
        if any(source.meta["val"].dtype is not value.dtype for source in node.all_input_nodes):
            return any_value(sizes_of(value), value.dtype)  # their bytes are read as another dtype
        both = [self._intervals[source] for source in node.all_input_nodes]
        return hull(sizes_of(value), *(interval for interval in both if isinstance(interval, Interval)))

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
        if name not in products.CENTRED and name not in products.PLAIN:
            return None
        x = self._intervals[node.all_input_nodes[0]]
        if not isinstance(x, Interval) or 0 in x.shape:
            return None
        reach = float(x.high.amax() - x.low.amin()) if name in products.CENTRED else x.peak
        return reach * reach * (1 + 2.0**-7)


class _Intervals(dict[fx.Node, Any]):
    """Intervals by node; those of weights are computed on first use."""

    def __init__(self, weights: KnownWeights) -> None:
        super().__init__()
        self._weights = weights

    def __missing__(self, node: fx.Node) -> Interval:
        self[node] = interval = self._weights.interval(node)
        return interval


def _as_stored(interval: Interval, dtype: torch.dtype | None, *, exact: bool) -> Interval:
    """Return the interval of a stored result, which is not rounded again if its op is exact."""
    form = format_of(dtype)
    if not exact or form is None:
        return stored(interval, dtype)
    return interval if interval.peak <= form.max else interval.clipped(form.max)


def _fits(result: Interval | list[Interval], shapes: list[tuple[int, ...]], *, several: bool) -> bool:
    """Return whether the intervals match the number and shapes of the values, with ordered ends."""
    intervals = result if isinstance(result, list) else [result]
    if [interval.shape for interval in intervals] != shapes or isinstance(result, list) != several:
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
    items = [any_value(sizes_of(item), item.dtype) for item in tensors_in(value)]
    return items if isinstance(value, list | tuple) else (items or [symmetric((), math.inf)])[0]


def _dtypes(value: Any) -> list[torch.dtype | None]:
    return [item.dtype for item in tensors_in(value)] or [None]


@dataclass(frozen=True, slots=True)
class Bound:
    """The bound that is proved for one site."""

    # bound on the magnitude of the values before rounding, for finite inputs; infinity if unknown
    peak: float
    proved: bool  # whether the peak is within the format of the site
    # bound on the largest square that a norm or variance computes; ``None`` for other ops
    inside: float | None = None

    def joined(self, other: Bound) -> Bound:
        """Return a bound that holds for the site in both graphs."""
        insides = [each.inside for each in (self, other) if each.inside is not None]
        both = self.proved and other.proved
        return Bound(max(self.peak, other.peak), both, max(insides, default=None))


@dataclass(frozen=True, slots=True)
class BoundTable:
    """The result of a bound pass."""

    bounds: dict[SiteId, Bound]  # bounds by site
    # intervals by node name, for tests and for the search of ``--stress``
    intervals: dict[str, Interval | list[Interval]]
    assumed: tuple[Assumption, ...]  # assumptions about the inputs
    # ops without a transfer function, or called in a way that it does not support; their values are unbounded
    uncovered: tuple[str, ...]
    failed: tuple[str, ...] = ()  # ops whose transfer function broke its contract, which is a defect

    def joined(self, other: BoundTable) -> BoundTable:
        """Return bounds that hold for two graphs of one model, with the intervals of this one."""
        bounds = dict(self.bounds)
        for site, site_bound in other.bounds.items():
            bounds[site] = bounds[site].joined(site_bound) if site in bounds else site_bound
        uncovered = tuple(sorted({*self.uncovered, *other.uncovered}))
        assumed = tuple(dict.fromkeys((*self.assumed, *other.assumed)))
        return BoundTable(bounds, self.intervals, assumed, uncovered, (*self.failed, *other.failed))

    @property
    def proved(self) -> frozenset[SiteId]:
        """Sites that do not overflow unless an earlier site does."""
        return frozenset(site for site, site_bound in self.bounds.items() if site_bound.proved)


class KnownWeights(dict[fx.Node, KnownTensor]):
    """Values known without a run, by node: weights behind views and casts; constants behind exact ops."""

    def __init__(self) -> None:
        super().__init__()
        self._constants: set[fx.Node] = set()

    def add_placeholder(
        self, node: fx.Node, tensor: torch.Tensor, dtype: torch.dtype, *, constant: bool
    ) -> None:
        """Record a placeholder's tensor, which the graph may hold in another dtype."""
        if constant and tensor.numel() <= MAX_COMPUTED:
            self[node] = KnownTensor(tensor.to(dtype))
            self._constants.add(node)
        else:
            self[node] = _cast(KnownTensor(tensor), tensor.dtype, dtype) or KnownTensor(tensor.to(dtype))

    def follow(self, node: fx.Node, entry: RegisteredTransfer) -> bool:
        """Compute a node's value if that is exact, and return whether the value is known."""
        sources, value = node.all_input_nodes, node.meta.get("val")
        op = overload_of(node.target)
        if op is None or not isinstance(value, torch.Tensor) or not all(source in self for source in sources):
            return False
        computable = self._computable(node, entry) and 0 <= math.prod(sizes_of(value)) <= MAX_COMPUTED
        weight = None
        if not computable and base_name(op) in CAST_OPS and sources:
            weight = _cast(self[sources[0]], sources[0].meta["val"].dtype, value.dtype)
        elif computable or (entry.moves and len(sources) == 1):
            result = self._result(node)
            if result is not None:
                weight = KnownTensor(result) if computable else replace(self[sources[0]], tensor=result)
        if weight is None:
            return False
        self[node] = weight
        if computable:
            self._constants.add(node)
        return True

    def _computable(self, node: fx.Node, entry: RegisteredTransfer) -> bool:
        """Return whether a value is constant and identical on every device."""
        if not all(source in self._constants for source in node.all_input_nodes):
            return False
        floats = [near.meta["val"].is_floating_point() for near in (node, *node.all_input_nodes)]
        return entry.exact or (entry.integers and not any(floats))

    def _result(self, node: fx.Node) -> torch.Tensor | None:
        try:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: self[source].tensor)
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, NotImplementedError, TypeError, IndexError):
            return None
        return result if isinstance(result, torch.Tensor) else None

    def peak(self, node: fx.Node) -> float:
        """Return the largest magnitude of a known value before rounding; infinite for NaN."""
        return self.peak_of(self[node].tensor)

    @staticmethod
    def peak_of(tensor: torch.Tensor) -> float:
        """Return the largest magnitude of a tensor; infinite for NaN."""
        if not tensor.numel():
            return 0.0
        if tensor.is_complex():
            return math.inf
        low, high = torch.aminmax(tensor.to(torch.int8) if tensor.dtype is torch.bool else tensor)
        largest = max(-float(low), float(high))
        return math.inf if math.isnan(largest) else largest

    def interval(self, node: fx.Node) -> Interval:
        """Return the interval of a known value as the graph holds it."""
        weight, dtype = self[node], node.meta["val"].dtype
        tensor = weight.tensor
        if tensor.is_complex():
            return any_value(tuple(tensor.shape), dtype)
        interval = from_tensor(tensor)
        if tensor.ndim == 2 and tensor.is_floating_point() and tensor.numel():
            lengths = {a: torch.linalg.vector_norm(weight.wide, dim=a, keepdim=True) for a in (0, 1)}
            wide = {a: n.double() * (1 + 2.0**-10) + VANISHING * tensor.shape[a] for a, n in lengths.items()}
            interval = replace(interval, norms=wide)
        if weight.relative or weight.absolute:
            interval = widened_once(interval, weight.relative, weight.absolute)
        form = format_of(dtype)
        return interval.clipped(form.max) if form is not None else interval


def _cast(weight: KnownTensor, source: torch.dtype, dtype: torch.dtype) -> KnownTensor | None:
    """Return a weight after a cast between floating-point dtypes; ``None`` for other casts."""
    if can_represent(dtype, source):
        return weight
    if not (source.is_floating_point and dtype.is_floating_point):
        return None
    return weight.rounded_to(dtype)


def assumptions(
    traced: TracedModel, batches: Sequence[Sequence[torch.Tensor]], stated: Iterable[str]
) -> dict[str, Assumption]:
    """Return the range of each input of the graph, by placeholder: as stated, or else that of the batches.

    Raises:
        UsageError: An assumption is about an input that the model does not have.
        InputError: An input without a stated range holds NaN or infinity.
    """
    places = [place for place in traced.placeholders if place.slot is Slot.INPUT]
    ranges = {name: (low, high) for name, low, high in map(parse_assumption, stated)}
    names = [place.name for place in places]
    for name in ranges:
        if name not in names and name != "input":
            hint = did_you_mean(name, [*names, "input"]) + f"inputs: {', '.join(names)}"
            raise UsageError(f"--assume {name}: the model has no such input", hint=hint)
    nodes = {node.name: node for node in traced.graph.find_nodes(op="placeholder")}
    return {
        place.node: _assumption_of(place, nodes[place.node], [batch[index] for batch in batches], ranges)
        for index, place in enumerate(places)
    }


def _assumption_of(
    place: Placeholder, node: Any, tensors: list[torch.Tensor], ranges: dict[str, tuple[float, float]]
) -> Assumption:
    floating = place.dtype is not None and place.dtype.is_floating_point
    if place.name in ranges or ("input" in ranges and floating):
        return Assumption(place.name, *ranges.get(place.name, ranges.get("input", (0.0, 0.0))), "stated")
    tables = [u for u in node.users if str(u.target).startswith("aten.embedding.") and u.args[1] is node]
    if tables and len(tables) == len(node.users):
        rows = min(int(table.args[0].meta["val"].shape[0]) for table in tables)
        return Assumption(place.name, 0.0, float(rows - 1), "embedding table")
    ends = [_range(tensor) for tensor in tensors if tensor.numel()]
    if floating and not all(low <= high < math.inf for low, high in ends):
        hint = f"clean the input, or state its range: --assume '{place.name}=LOW:HIGH'"
        raise InputError(f"{place.name} holds NaN or infinity", hint=hint)
    low, high = min((e[0] for e in ends), default=0.0), max((e[1] for e in ends), default=0.0)
    return Assumption(place.name, low, high, "batches")


def contains(
    assumed: Iterable[Assumption], traced: TracedModel, batches: Sequence[Sequence[torch.Tensor]]
) -> bool:
    """Return whether batches satisfy the assumptions about a graph's inputs."""
    by_name = {each.name: each for each in assumed}
    names = [place.name for place in traced.placeholders if place.slot is Slot.INPUT]
    for index, name in enumerate(names):
        ends = [_range(batch[index]) for batch in batches if batch[index].numel()]
        assumption = by_name.get(name)
        if assumption is None or any(low < assumption.low or high > assumption.high for low, high in ends):
            return False
    return True


def _range(tensor: torch.Tensor) -> tuple[float, float]:
    value = tensor.to(torch.int8) if tensor.dtype is torch.bool else tensor
    if value.is_complex():
        return -math.inf, math.inf
    return float(value.amin()), float(value.amax())
