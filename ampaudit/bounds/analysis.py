"""Walks the graph once and bounds every value: what no input of the domain can leave."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.bounds import elementwise, functions, norms, products, reductions, shapes
from ampaudit.bounds.memory import overwritten
from ampaudit.bounds.span import Span, between, exactly, symmetric, unbounded
from ampaudit.bounds.transfers import FLOAT32_ULP, TRANSFERS, OpCall
from ampaudit.formats import FORMATS, LOWER_FORMATS, NumberFormat
from ampaudit.ranges import Assumption
from ampaudit.sites import SiteId
from ampaudit.trace.flow import Flow
from ampaudit.trace.graph import Placeholder, Role, Site, Slot, TracedModel
from ampaudit.trace.opnames import CAST_OPS, base_name, is_view, mutated_arguments, named_arguments
from ampaudit.trace.sizes import sizes_of, sizes_vary

__all__ = ["Bound", "SpanTable", "bound"]

_REGISTERED = (elementwise, functions, norms, products, reductions, shapes)
_NAMES = {form.name for form in LOWER_FORMATS}
FOLDED = 1 << 22  # elements up to which a constant is computed


@dataclass(frozen=True, slots=True)
class Bound:
    """What is proved about one site.

    Attributes:
        peak: no finite input of the site makes a larger value before it is rounded; infinity if unknown.
        proved: whether that is within the format of the site.
        inside: of a norm or variance, a bound on the largest square that it computes; ``None`` of other ops.
    """

    peak: float
    proved: bool
    inside: float | None = None


@dataclass(frozen=True, slots=True)
class SpanTable:
    """The result of a bound pass.

    Attributes:
        bounds: by site.
        spans: by node name, for tests and for the search of ``--stress``.
        assumed: what the proof rests on.
        uncovered: ops without a transfer function; their values are taken to be anything.
    """

    bounds: dict[SiteId, Bound]
    spans: dict[str, Span | list[Span]]
    assumed: tuple[Assumption, ...]
    uncovered: tuple[str, ...]

    @property
    def proved(self) -> frozenset[SiteId]:
        """Sites that do not overflow unless one before them has."""
        return frozenset(site for site, found in self.bounds.items() if found.proved)


def bound(traced: TracedModel, domain: Mapping[str, Assumption], form: NumberFormat) -> SpanTable:
    """Bounds for every site of a graph.

    A value of an op in 16 bits that is not proved is taken to lie within the format from there on: were it
    not, it would be infinite, and that is the fault of its site alone. So a proof says: as long as nothing
    before it has overflowed, this site does not.

    Args:
        traced: the graph, with its weights.
        domain: ranges of the inputs, by placeholder.
        form: the 16-bit format of the run.
    """
    with torch.no_grad():
        return _Pass(traced, domain, form).run()


@dataclass(slots=True)
class _Pass:
    traced: TracedModel
    domain: Mapping[str, Assumption]
    form: NumberFormat
    flow: Flow = field(init=False)
    spans: _Spans = field(init=False)
    sites: dict[str, Site] = field(init=False)
    bounds: dict[SiteId, Bound] = field(default_factory=dict)
    uncovered: dict[str, None] = field(default_factory=dict)
    constant: set[fx.Node] = field(default_factory=set)
    spoiled: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.flow = Flow(self.traced)
        self.spans = _Spans()
        self.sites = self.traced.site_of_node
        self.spoiled = set(overwritten(self.traced.graph))

    def run(self) -> SpanTable:
        places = {place.node: place for place in self.traced.placeholders}
        for node in self.traced.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, places[node.name])
            elif node.op == "call_function":
                self._call(node)
        return SpanTable(
            self.bounds, self.spans.by_name(), tuple(self.domain.values()), tuple(sorted(self.uncovered))
        )

    def _placeholder(self, node: fx.Node, place: Placeholder) -> None:
        shape = _shape(node)
        if node in self.spoiled:
            self.spans[node] = unbounded(shape)
            return
        if place.slot is Slot.INPUT:
            given = self.domain[node.name]
            self.spans[node] = _rounded(between(shape, given.low, given.high), place.dtype)
            return
        self.spans.tensors[node] = self.traced.tensors[node.name].detach()
        if place.slot is not Slot.PARAMETER:
            self.constant.add(node)

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            items = self.spans[source]  # type: ignore[index]
            self.spans[node] = items[index] if isinstance(items, list) else unbounded(_shape(node))  # type: ignore[index]
            return
        if self._fold(node):
            self._prove(node, [self.spans.peak(node)])
            return
        found = self._transferred(node)
        self._prove(node, [item.peak for item in (found if isinstance(found, list) else [found])])
        self.spans[node] = (
            [_rounded(item, d) for item, d in zip(found, _dtypes(node), strict=False)]
            if isinstance(found, list)
            else _rounded(found, _dtypes(node)[0])
        )

    def _fold(self, node: fx.Node) -> bool:
        """Compute what depends on constants alone; keep the value of a view or cast of a weight."""
        target, sources = node.target, node.all_input_nodes
        if not isinstance(target, OpOverload) or mutated_arguments(target) or node in self.spoiled:
            return False
        casts = base_name(target) in CAST_OPS
        handed_on = casts or is_view(target)
        known = all(source in self.spans.tensors for source in sources)
        constant = known and all(source in self.constant for source in sources)
        computed = constant and math.prod(_shape(node)) <= FOLDED and len(_dtypes(node)) == 1
        seeded = torch.Tag.nondeterministic_seeded in target.tags
        if seeded or not (computed or (handed_on and known and sources)):
            return False
        if casts and not constant:
            self.spans.tensors[node] = self.spans.tensors[sources[0]]  # rounding is added where it is used
            return True
        try:
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self.spans.tensors.__getitem__)
            value = target(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, IndexError):
            return False
        if not isinstance(value, torch.Tensor):
            return False
        self.spans.tensors[node] = value
        if constant:
            self.constant.add(node)
        return True

    def _transferred(self, node: fx.Node) -> Span | list[Span]:
        target = node.target
        value = node.meta.get("val")
        if not isinstance(target, OpOverload):
            if next(_items(value), None) is not None:
                self.uncovered[str(target)] = None
            return _unknown(value)
        function = TRANSFERS.get(base_name(target).rstrip("_"))
        if function is None:
            if any(getattr(item, "dtype", torch.int64).is_floating_point for item in _items(value)):
                self.uncovered[str(target)] = None
            return _unknown(value)
        if node in self.spoiled or any(source in self.spoiled for source in node.all_input_nodes):
            return _unknown(value)
        if any(sizes_vary(near.meta.get("val")) for near in (node, *node.all_input_nodes)):
            self.uncovered[str(target)] = None
            return _unknown(value)
        given = named_arguments(target, node.args, dict(node.kwargs))
        call = OpCall(node, given, self.spans, self.spans.tensors, self.flow, self.form.max)
        return function(call)

    def _prove(self, node: fx.Node, peaks: list[float]) -> None:
        site = self.sites.get(node.name)
        if site is None or site.dtype is None:
            return
        form = FORMATS.get(str(site.dtype).removeprefix("torch."))
        peak = max(peaks, default=0.0)
        computed = peak * (1 + 8 * FLOAT32_ULP)
        limit = form.overflow_at if form is not None else math.inf
        if site.role in (Role.VIEW, Role.SELECT):  # no new values
            limit = math.inf if math.isfinite(peak) else limit
        self.bounds[site.id] = Bound(computed, bool(computed < limit), self._inside(node))

    def _inside(self, node: fx.Node) -> float | None:
        """(x - mean)^2 of a centring norm is at most the spread, squared; x^2 of another the squared peak."""
        target = node.target
        name = base_name(target) if isinstance(target, OpOverload) else ""
        if name not in norms.CENTRED and name not in norms.PLAIN:
            return None
        x = self.spans[node.all_input_nodes[0]]
        if not isinstance(x, Span) or not x.low.numel():
            return None
        reach = float(x.high.amax() - x.low.amin()) if name in norms.CENTRED else x.peak
        return reach * reach * (1 + 2.0**-7)


class _Spans(dict[fx.Node, Any]):
    """Spans by node; those of weights are worked out when somebody asks."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[fx.Node, torch.Tensor] = {}

    def peak(self, node: fx.Node) -> float:
        """The largest magnitude of a weight or constant, before it is rounded."""
        tensor = self.tensors[node]
        if not tensor.numel() or tensor.is_complex():
            return 0.0 if not tensor.numel() else math.inf
        low, high = torch.aminmax(tensor.to(torch.int8) if tensor.dtype is torch.bool else tensor)
        return max(-float(low), float(high))

    def raw(self, node: fx.Node) -> Span:
        """A weight or constant before it is rounded to what the graph holds."""
        tensor = self.tensors[node]
        if tensor.is_complex():
            return unbounded(tuple(tensor.shape))
        found = exactly(tensor)
        if tensor.ndim != 2 or not tensor.is_floating_point() or not tensor.numel():
            return found
        lengths = {axis: torch.linalg.vector_norm(tensor, dim=axis, keepdim=True) for axis in (0, 1)}
        wide = {axis: length.double() * (1 + 2.0**-10) for axis, length in lengths.items()}
        return Span(found.shape, found.low, found.high, wide)

    def __missing__(self, node: fx.Node) -> Span:
        self[node] = _rounded(self.raw(node), _dtypes(node)[0])
        found: Span = self[node]
        return found

    def by_name(self) -> dict[str, Span | list[Span]]:
        return {node.name: found for node, found in self.items()}


def _rounded(span: Span, dtype: torch.dtype | None) -> Span:
    """A value as it is stored: rounded to its format, and within it."""
    form = FORMATS.get(str(dtype).removeprefix("torch."))
    if form is None:
        return span
    loose = form.eps / 2 if form.name in _NAMES else 8 * FLOAT32_ULP
    return span.widened(loose, form.min_subnormal / 2).clipped(form.max)


def _unknown(value: Any) -> Span | list[Span]:
    items = [unbounded(sizes_of(item)) for item in _items(value)]
    return items if isinstance(value, list | tuple) else (items or [symmetric((), math.inf)])[0]


def _items(value: Any) -> Iterator[torch.Tensor]:
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, torch.Tensor):
            yield item


def _dtypes(node: fx.Node) -> list[torch.dtype | None]:
    value = node.meta.get("val")
    return [getattr(item, "dtype", None) for item in (value if isinstance(value, list | tuple) else (value,))]


def _shape(node: fx.Node) -> tuple[int, ...]:
    return sizes_of(node.meta.get("val"))
