"""Finds the weights to scale so that a stream of values shrinks by 2^-k and no output of the model changes.

The degrees of weights are unknowns; those of all other values follow from them (``residual_ops``). The search
starts with the weights that produce one value, and assigns the degrees that other ops then require. The
result is a proof: with these weights scaled, every op accepts its operands and every output has degree 0.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import fx

from ampaudit.audit.advice.residual_call import Degree, Needed, Refusal, ScaledCall, Stream
from ampaudit.audit.advice.residual_ops import ADDITIVE, LINEAR, NORMALIZING, PRODUCTS, degree_of
from ampaudit.trace import Site
from ampaudit.trace.converted import identity
from ampaudit.trace.flow import Flow
from ampaudit.trace.functional import overload_of
from ampaudit.trace.graph import Placeholder, Slot
from ampaudit.trace.opnames import is_view, written_values

__all__ = ["find_stream"]

_REPAIRS = 20_000  # needs met; each gives a weight its degree
_CHANGES = 4  # of the degree of one weight
_ENDLESS = "the search for the weights that scale the stream did not end"
_READING = frozenset("pow square mean sum var mul isinf isnan isfinite".split())
_READS = "a product reads the stream"


_Key: TypeAlias = tuple[object, ...]
_Plan: TypeAlias = tuple[dict[_Key, int], bool]


class _Refused(Exception):
    """Raised if no assignment gives a value the degree that it needs."""


def find_stream(flow: Flow, site: Site, limit: float) -> Stream | Refusal:
    """Find the stream that a site's value is on.

    Args:
        flow: Flow of all graphs of the model.
        site: Site whose value is to shrink.
        limit: Largest number of the 16-bit format.
    """
    if any(traced.path for traced in flow.every):
        return Refusal("the model's code decides by values, and its graph shows only the path that it took")
    search = _Search(flow, limit)
    try:
        search.solve(flow.node(site))
        return search.proof()
    except _Refused as refused:
        return Refusal(str(refused))


@dataclass(slots=True)
class _Search:
    flow: Flow
    limit: float
    order: dict[fx.Node, int] = field(init=False)
    degrees: dict[fx.Node, Degree] = field(init=False)
    weights: dict[fx.Node, Placeholder] = field(default_factory=dict)
    keys: dict[fx.Node, _Key] = field(default_factory=dict)  # of weights; tied ones have one
    assigned: dict[_Key, int] = field(default_factory=dict)
    changes: dict[_Key, int] = field(default_factory=dict)
    overwritten: set[fx.Node] = field(init=False)
    plans: dict[tuple[fx.Node, int], _Plan | _Refused] = field(default_factory=dict)  # under these degrees

    def __post_init__(self) -> None:
        nodes = [node for each in self.flow.every for node in each.graph.nodes]
        self.order = {node: number for number, node in enumerate(nodes)}
        self.degrees = dict.fromkeys(nodes, 0)
        for traced in self.flow.every:
            places = {p.node: p for p in traced.placeholders}
            for node in traced.graph.nodes:
                if node.op == "placeholder" and node.name in traced.tensors:
                    tensor = traced.tensors[node.name]
                    self.weights[node] = places[node.name]
                    self.keys[node] = identity(tensor)
                    if places[node.name].slot is Slot.CONSTANT and not bool(tensor.any()):
                        self.degrees[node] = None
        calls = ((node, op) for node in nodes if (op := overload_of(node.target)) is not None)
        targets = (value for node, op in calls for value in written_values(op, node.args, dict(node.kwargs)))
        self.overwritten = {_root(value) for value in targets if isinstance(value, fx.Node)}

    def solve(self, seed: fx.Node) -> None:
        """Assign degrees to weights until every op accepts its operands."""
        waiting = list(self.order.values())
        heapq.heapify(waiting)
        nodes = list(self.order)
        source = self._source(seed)
        changed = self._assign(self._plan(source, 1)[0])
        for _ in range(_REPAIRS):
            for node in changed:
                heapq.heappush(waiting, self.order[node])
            changed = []
            while waiting and not changed:
                node = nodes[heapq.heappop(waiting)]
                try:
                    degree = self._degree(node)
                except Needed as needed:
                    changed = [node, *self._repair(needed)]
                else:
                    if degree != self.degrees[node]:
                        self.degrees[node] = degree
                        for user in node.users:
                            heapq.heappush(waiting, self.order[user])
            if not changed and self.degrees[source] == 1:
                return
            if not changed:
                break
        raise _Refused(_ENDLESS)

    def proof(self) -> Stream:
        """Recompute every degree from those of the weights, and refuse if an op needs another."""
        numbers: dict[tuple[fx.Node, str], int] = {}
        clamps: list[fx.Node] = []
        for node in self.order:
            call = self._call(node)
            try:
                computed = self._degree(node, call)
            except Needed as needed:
                raise _Refused(needed.reason) from None
            if computed != self.degrees[node]:
                raise _Refused(_ENDLESS)
            numbers.update(((node, name), degree) for name, degree in call.numbers.items() if degree)
            if call.clamps:
                clamps.append(node)
        names = {self.keys[node]: place.name for node, place in reversed(self.weights.items())}
        keys = dict.fromkeys(self.keys.values())  # in the model's order
        scaled = {names[key]: degree for key in keys if (degree := self.assigned.get(key))}
        plain = {node: d for node, d in self.degrees.items() if isinstance(d, int) and d}
        return Stream(plain, scaled, numbers, tuple(clamps))

    def _call(self, node: fx.Node) -> ScaledCall:
        site = self.flow.site(node)
        return ScaledCall(node, str(site.id) if site is not None else node.name, self.degrees, self.limit)

    def _degree(self, node: fx.Node, call: ScaledCall | None = None) -> Degree:
        if node.op == "placeholder":
            return self.assigned.get(self.keys.get(node, ()), self.degrees[node])
        if node.op == "output":
            for value in node.all_input_nodes:
                if self.degrees[value]:
                    raise Needed(value, 0, "the stream leaves the model as an output")
            return 0
        result = degree_of(call or self._call(node))
        return 0 if result is None and node in self.overwritten else result

    def _source(self, node: fx.Node) -> fx.Node:
        """Return the nearest value with a plan, looking back through squares, means and comparisons."""
        while True:
            try:
                self._plan(node, 1)
            except _Refused:
                site = self.flow.site(node)
                inner = self.flow.base(site) in _READING
                if not inner or not node.all_input_nodes:
                    raise
                node = node.all_input_nodes[0]
            else:
                return node

    def _repair(self, needed: Needed) -> list[fx.Node]:
        """Assign the degrees that an operand needs; return the placeholders that changed."""
        self.plans.clear()
        try:
            plan, _ = self._plan(needed.node, needed.degree)
        except _Refused as refused:
            text = str(refused)
            if needed.degree == 0:
                text = needed.reason + (f"; {text}" if text != _READS else "")
            raise _Refused(text if text != _READS else needed.reason) from None
        if not any(plan.values()):  # it would undo the scaling of the stream
            raise _Refused(needed.reason)
        return self._assign(plan)

    def _assign(self, plan: Mapping[_Key, int]) -> list[fx.Node]:
        for key, degree in plan.items():
            self.assigned[key] = degree
            self.changes[key] = self.changes.get(key, 0) + 1
            if self.changes[key] > _CHANGES:
                name = next(place.name for node, place in self.weights.items() if self.keys[node] == key)
                raise _Refused(f"{name} would have to scale in two ways")
        return [node for node, key in self.keys.items() if key in plan]

    def _plan(self, start: fx.Node, degree: int) -> _Plan:
        """Return weights that give a value its degree, and whether every value on the way has one reader."""
        key = (start, degree)
        if key not in self.plans:
            try:
                self.plans[key] = self._make_plan(start, degree)
            except _Refused as refused:
                self.plans[key] = refused
        plan = self.plans[key]
        if isinstance(plan, _Refused):
            raise plan
        return plan

    def _make_plan(self, start: fx.Node, degree: int) -> _Plan:
        plan: dict[_Key, int] = {}
        waiting, visited, alone = [(start, degree)], set[tuple[fx.Node, int]](), True
        while waiting:
            node, target = waiting.pop()
            if (node, target) in visited or self.degrees[node] in (target, None):
                continue
            visited.add((node, target))
            alone = alone and len(node.users) == 1
            if node.op != "placeholder":
                waiting += self._operands(node, target)
                continue
            place = self.weights.get(node)
            if place is None:
                raise _Refused("an input of the model is on the stream")
            if place.slot is Slot.CONSTANT or place.dtype is None or not place.dtype.is_floating_point:
                raise _Refused(f"the constant {place.name} is added to the stream")
            if plan.setdefault(self.keys[node], target) != target:
                raise _Refused(f"{place.name} would have to scale in two ways")
        return plan, alone

    def _operands(self, node: fx.Node, degree: int) -> list[tuple[fx.Node, int]]:
        """Return the operands that must scale with an op's result, and the degrees that they need."""
        call = self._call(node)
        base, op = call.base, overload_of(node.target)
        if base in PRODUCTS:
            return self._factors(call, degree)
        if base in NORMALIZING:
            affine = [item for _, item in call.operands("weight", "bias") if isinstance(item, fx.Node)]
            if not affine:
                raise _Refused(f"{call.name} writes to the stream and has no weight")
            return [(item, degree) for item in affine]
        if base in ADDITIVE:
            names = [name for name in call.arguments if name not in ("condition", "mask", "index", "indices")]
            items = [item for _, item in call.operands(*names) if isinstance(item, fx.Node)]
            return [(item, degree) for item in items]
        if base in ("embedding", "scaled_dot_product_attention"):
            return [(call.arguments["weight" if base == "embedding" else "value"], degree)]
        through = node.target is operator.getitem or (op is not None and is_view(op))
        if base in LINEAR or base in ("clamp", "clamp_min", "clamp_max", "nan_to_num") or through:
            return [(node.all_input_nodes[0], degree)]
        raise _Refused(f"{call.name} writes to the stream, and no weight scales its result")

    def _factors(self, call: ScaledCall, degree: int) -> list[tuple[fx.Node, int]]:
        """Scale the weight of a product, or its input if the weight is used elsewhere."""
        factors = [item for _, item in call.operands(*PRODUCTS[call.base]) if isinstance(item, fx.Node)]
        current = [d if isinstance(d := self.degrees[item], int) else 0 for item in factors]
        names = ("bias", *(() if "self" in PRODUCTS[call.base] else ("self",)))
        added = [(item, degree) for _, item in call.operands(*names) if isinstance(item, fx.Node)]
        divisor = self.degrees[item] if isinstance(item := call.arguments.get("other"), fx.Node) else 0
        missing = degree - sum(current) + (divisor if call.base == "div" and isinstance(divisor, int) else 0)
        weights = [self._is_weight(item) for item in factors]
        if any(d and not weight for d, weight in zip(current, weights, strict=True)):
            raise _Refused(_READS)
        ours = (item for item, weight in zip(factors, weights, strict=True) if weight)
        exclusive = [item for item in ours if self._is_used_once(item)]
        ranked = [*exclusive, *(f for f in reversed(factors) if f not in exclusive)]
        possible: list[fx.Node] = []
        reason = f"{call.name} writes to the stream, and no weight scales its result"
        for item in ranked:
            try:
                _, alone = self._plan(item, current[factors.index(item)] + missing)
            except _Refused as refused:
                reason = str(refused) if len(factors) == 1 else reason
            else:
                possible.append(item)
                if alone or item in exclusive:
                    possible = [item]
                    break
        if not possible:
            raise _Refused(reason)
        return [(possible[0], current[factors.index(possible[0])] + missing), *added]

    def _is_weight(self, node: fx.Node) -> bool:
        return (place := self.flow.given(node)) is not None and place.slot in (Slot.PARAMETER, Slot.BUFFER)

    def _is_used_once(self, node: fx.Node) -> bool:
        root = self.flow.root(node)
        assert root is not None
        graph = root.graph
        same = [other for other in self.keys if self.keys[other] == self.keys[root] and other.graph is graph]
        return sum(1 for _ in self._uses(same)) == 1

    def _uses(self, nodes: Iterable[fx.Node]) -> Iterable[fx.Node]:
        for node in nodes:
            for user in node.users:
                if user.op == "call_function" and self.flow.root(user) is not user:
                    yield from self._uses([user])
                else:
                    yield user


def _root(value: fx.Node) -> fx.Node:
    """Return the value whose memory a view shares."""
    while (op := overload_of(value.target)) is not None and is_view(op) and value.all_input_nodes:
        value = value.all_input_nodes[0]
    return value
