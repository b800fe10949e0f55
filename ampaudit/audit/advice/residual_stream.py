"""Finds the weights to scale so that a stream of values shrinks by 2^-k and no output of the model changes.

The degrees of weights are unknowns; those of all other values follow from them (``residual_ops``). The search
starts with the weights that produce one value, and assigns the degrees that other ops then require. The
result is a proof: with these weights scaled, every op accepts its operands and every output has degree 0.

A value has degree d if scaling the stream by 2^-k scales the value by 2^(-k d), bit for bit: ops on scaled
operands round alike, since a power of two changes no bit of a significand. ``None`` is the degree of zeros,
which scale with anything. Ops without a rule take values of degree 0 only.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampaudit.core.ops import having
from ampaudit.trace import Site
from ampaudit.trace.converted import identity
from ampaudit.trace.flow import Flow
from ampaudit.trace.functional import overload_of
from ampaudit.trace.graph import Placeholder, Slot
from ampaudit.trace.opnames import (
    argument_names,
    base_name,
    is_view,
    mutated_arguments,
    named_arguments,
    written_values,
)

Degree: TypeAlias = "int | tuple[int | None, ...] | None"
_NEAR_LIMIT = 0.9  # of the format's largest number, where a clamp only stands for its limit

_LIKE = frozenset("type_as view_as expand_as reshape_as to".split())  # another operand gives type or shape
_LINEAR_IN = {"embedding": "weight", "scaled_dot_product_attention": "value"}
# f(c x, c y) = c f(x, y); by name of the operands
_BOTH = ("self", "other", "tensors", "value", "source", "src", "values", "end")
PRODUCTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("mul", "matmul", "mm", "bmm", "mv", "_grouped_mm"), ("self", "other", "mat2", "vec")),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "linear", "convolution"), ("input", "weight")),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), ("input", "weight")),
    **dict.fromkeys(("addmm", "baddbmm"), ("mat1", "mat2", "batch1", "batch2")),
    "einsum": ("tensors",),
    "div": ("self",),
}
_POWERS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "var": 2.0}
_EXACT_POWERS = (1, 2, 3, 0.5, -0.5, -1, -2)
_FILLS = having("constant", "reads_shape")
_REPAIRS = 20_000  # each assigns degrees to weights
_CHANGES = 4  # of the degree of one weight
_ENDLESS = "the search for the weights that scale the stream was given up"
_READING = frozenset("pow square mean sum var mul isinf isnan isfinite".split())
_READS = "a product reads the stream"


_Key: TypeAlias = tuple[object, ...]
_Plan: TypeAlias = tuple[dict[_Key, int], bool]


class DegreeRequired(Exception):
    """Raised if an operand needs another degree; the reason is reported if no weights give it that degree."""

    def __init__(self, node: fx.Node, degree: int, reason: str) -> None:
        super().__init__(reason)
        self.node, self.degree, self.reason = node, degree, reason


@dataclass(slots=True)
class ScaledCall:
    """One op of the graph, with the degrees of its operands."""

    node: fx.Node  # node of the op
    name: str  # name of the op in refusals
    degrees: Mapping[fx.Node, Degree]  # degrees of the nodes before it
    limit: float  # largest number of the 16-bit format
    # for each Python number that scales, such as an eps, its degree, by argument
    numbers: dict[str, int] = field(default_factory=dict)
    clamps: bool = False  # whether the op limits scaled values at the format's range
    arguments: dict[str, Any] = field(init=False)  # arguments by name

    def __post_init__(self) -> None:
        op = overload_of(self.node.target)
        self.arguments = {} if op is None else named_arguments(op, self.node.args, dict(self.node.kwargs))

    @property
    def base(self) -> str:
        """The op without overload and in-place mark; empty if it is not an ATen op."""
        op = overload_of(self.node.target)
        return "" if op is None else base_name(op).rstrip("_")

    def operands(self, *names: str) -> Iterator[tuple[str, Any]]:
        """Yield the tensors and numbers among the named arguments, with lists flattened."""
        for name in names:
            value = self.arguments.get(name)
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, fx.Node | float | int):
                    yield name, item

    def of(self, name: str) -> int | None:
        """Return the degree of an argument; 0 if it is missing or a number."""
        return self.plain(self.arguments.get(name))

    def plain(self, value: Any) -> int | None:
        """Return the degree of a tensor or a number."""
        if not isinstance(value, fx.Node):
            return None if value == 0 and isinstance(value, int | float) else 0
        degree = self.degrees[value]
        if isinstance(degree, tuple):
            raise DegreeRequired(value, 0, f"{self.name} reads the stream before a norm")
        return degree

    def equal(self, *names: str) -> int | None:
        """Return the common degree of operands, and record that numbers among them scale as well."""
        operands = [(name, item, self.plain(item)) for name, item in self.operands(*names)]
        tensors = [d for _, item, d in operands if isinstance(item, fx.Node) and d is not None]
        degree = next((d for d in tensors if d), 0 if tensors else None)
        for name, item, own_degree in operands:
            if own_degree in (None, degree) or degree is None:
                continue
            if isinstance(item, fx.Node):
                raise DegreeRequired(
                    item, degree, f"{self.name} joins the stream with a value that does not scale alike"
                )
            self.numbers[name] = degree
        return degree if degree is not None or all(d is None for *_, d in operands) else 0

    def only_zero(self, *exceptions: str) -> None:
        """Require degree 0 of all operands except the named arguments."""
        others = [value for name, value in self.arguments.items() if name not in exceptions]
        values = pytree.tree_leaves(others) if self.arguments else self.node.all_input_nodes
        for node in values:  # one value may be several arguments
            if isinstance(node, fx.Node) and self.degrees[node]:
                raise DegreeRequired(node, 0, f"{self.name} reads the stream before a norm")


class Refusal(Exception):
    """Raised with the reason why nothing can be rescaled."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of values and what scales with it."""

    degrees: Mapping[fx.Node, int]  # degree of every value that scales; 1 for the stream itself
    weights: Mapping[str, int]  # degrees of the weights that scale, by name; one name for tied weights
    # degrees of the Python numbers that scale, by node and argument
    numbers: Mapping[tuple[fx.Node, str], int]
    clamps: tuple[fx.Node, ...]  # ops that limit the stream at the format's range


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """A number attribute of a module that is multiplied by a power of two."""

    module: str  # path of the module
    name: str  # name of the attribute
    old: float  # value before the change; the default of the dtype if the module has ``None``
    new: float  # value after the change


def find_stream(flow: Flow, site: Site, limit: float) -> Stream:
    """Find the stream that a site's value is on; ``limit`` is the largest number of the 16-bit format.

    Raises:
        Refusal: No weights scale the stream without a change of the model's outputs.
    """
    if any(traced.path for traced in flow.traces):
        raise Refusal("the model's code decides by values, and its graph shows only the path that it took")
    search = _Search(flow, limit)
    search.solve(flow.node(site))
    return search.proof()


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
    plans: dict[tuple[fx.Node, int], _Plan | Refusal] = field(default_factory=dict)  # under these degrees

    def __post_init__(self) -> None:
        nodes = [node for each in self.flow.traces for node in each.graph.nodes]
        self.order = {node: number for number, node in enumerate(nodes)}
        self.degrees = dict.fromkeys(nodes, 0)
        for traced in self.flow.traces:
            places = {p.node: p for p in traced.placeholders}
            for node in traced.graph.find_nodes(op="placeholder"):
                if (tensor := traced.tensors.get(node.name)) is not None:
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
                except DegreeRequired as required:
                    changed = [node, *self._repair(required)]
                    continue
                if degree != self.degrees[node]:
                    self.degrees[node] = degree
                    for user in node.users:
                        heapq.heappush(waiting, self.order[user])
            if not changed:
                break
        if changed or self.degrees[source] != 1:
            raise Refusal(_ENDLESS)

    def proof(self) -> Stream:
        """Recompute every degree from those of the weights, and refuse if an op needs another."""
        numbers: dict[tuple[fx.Node, str], int] = {}
        clamps: list[fx.Node] = []
        for node in self.order:
            call = self._call(node)
            try:
                computed = self._degree(node, call)
            except DegreeRequired as required:
                raise Refusal(required.reason) from None
            if computed != self.degrees[node]:
                raise Refusal(_ENDLESS)
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
                    raise DegreeRequired(value, 0, "the stream leaves the model as an output")
            return 0
        result = degree_of(call or self._call(node))
        return 0 if result is None and node in self.overwritten else result

    def _source(self, node: fx.Node) -> fx.Node:
        """Return the nearest value with a plan, looking back through squares, means and comparisons."""
        while True:
            try:
                self._plan(node, 1)
                return node
            except Refusal:
                if self.flow.base(self.flow.site(node)) not in _READING or not node.all_input_nodes:
                    raise
                node = node.all_input_nodes[0]

    def _repair(self, required: DegreeRequired) -> list[fx.Node]:
        """Assign the degrees that an operand needs; return the placeholders that changed."""
        self.plans.clear()
        try:
            plan, _ = self._plan(required.node, required.degree)
        except Refusal as refused:
            text = str(refused)
            if required.degree == 0:
                text = required.reason + (f"; {text}" if text != _READS else "")
            raise Refusal(text if text != _READS else required.reason) from None
        if not any(plan.values()):  # it would undo the scaling of the stream
            raise Refusal(required.reason)
        return self._assign(plan)

    def _assign(self, plan: Mapping[_Key, int]) -> list[fx.Node]:
        for key, degree in plan.items():
            self.assigned[key] = degree
            self.changes[key] = self.changes.get(key, 0) + 1
            if self.changes[key] > _CHANGES:
                name = next(place.name for node, place in self.weights.items() if self.keys[node] == key)
                raise Refusal(f"{name} would have to scale in two ways")
        return [node for node, key in self.keys.items() if key in plan]

    def _plan(self, start: fx.Node, degree: int) -> _Plan:
        """Return weights that give a value its degree, and whether every value on the way has one reader."""
        if (start, degree) not in self.plans:
            try:
                self.plans[start, degree] = self._make_plan(start, degree)
            except Refusal as refused:
                self.plans[start, degree] = refused
        plan = self.plans[start, degree]
        if isinstance(plan, Refusal):
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
                raise Refusal("an input of the model is on the stream")
            if place.slot is Slot.CONSTANT or place.dtype is None or not place.dtype.is_floating_point:
                raise Refusal(f"the constant {place.name} is added to the stream")
            if plan.setdefault(self.keys[node], target) != target:
                raise Refusal(f"{place.name} would have to scale in two ways")
        return plan, alone

    def _operands(self, node: fx.Node, degree: int) -> list[tuple[fx.Node, int]]:
        """Return the operands that must scale with an op's result, and the degrees that they need."""
        call = self._call(node)
        base, op = call.base, overload_of(node.target)
        if base in PRODUCTS:
            return self._factors(call, degree)
        if base in having("normalizes"):
            affine = [item for _, item in call.operands("weight", "bias") if isinstance(item, fx.Node)]
            if not affine:
                raise Refusal(f"{call.name} writes to the stream and has no weight")
            return [(item, degree) for item in affine]
        if base in having("additive"):
            names = [name for name in call.arguments if name not in ("condition", "mask", "index", "indices")]
            items = [item for _, item in call.operands(*names) if isinstance(item, fx.Node)]
            return [(item, degree) for item in items]
        if base in _LINEAR_IN:
            return [(call.arguments[_LINEAR_IN[base]], degree)]
        through = node.target is operator.getitem or (op is not None and is_view(op))
        if base in having("linear") or base in ("clamp", "clamp_min", "clamp_max", "nan_to_num") or through:
            return [(node.all_input_nodes[0], degree)]
        raise Refusal(f"{call.name} writes to the stream, and no weight scales its result")

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
            raise Refusal(_READS)
        stored = (item for item, weight in zip(factors, weights, strict=True) if weight)
        exclusive = [item for item in stored if self._is_used_once(item)]
        ranked = [*exclusive, *(f for f in reversed(factors) if f not in exclusive)]
        choice: tuple[fx.Node, int] | None = None
        reason = f"{call.name} writes to the stream, and no weight scales its result"
        for item in ranked:
            needed = current[factors.index(item)] + missing
            try:
                _, alone = self._plan(item, needed)
            except Refusal as refused:
                reason = str(refused) if len(factors) == 1 else reason
                continue
            if choice is None or alone or item in exclusive:
                choice = item, needed
            if alone or item in exclusive:
                break
        if choice is None:
            raise Refusal(reason)
        return [choice, *added]

    def _is_weight(self, node: fx.Node) -> bool:
        return (place := self.flow.placeholder(node)) is not None and place.slot in (
            Slot.PARAMETER,
            Slot.BUFFER,
        )

    def _is_used_once(self, node: fx.Node) -> bool:
        root = self.flow.root(node)
        assert root is not None
        tied = (other for other, key in self.keys.items() if key == self.keys[root])
        return len(list(self._uses(other for other in tied if other.graph is root.graph))) == 1

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


def degree_of(call: ScaledCall) -> Degree:
    """Return the degree of an op's result.

    Raises:
        DegreeRequired: An operand has a degree that the op does not accept.
    """
    inputs = [call.degrees[node] for node in call.node.all_input_nodes]
    base = call.base
    filled = next(call.operands("fill_value", "s"), ("", 1))[1]
    if base in having("zeros") or (base in _FILLS and filled == 0):
        return None
    if not any(d is None or d for d in inputs) or base in _FILLS:
        return 0
    if call.node.target is operator.getitem:
        source, place = call.node.args
        source_degree = call.degrees[source]  # type: ignore[index]
        return source_degree[place] if isinstance(source_degree, tuple) else source_degree  # type: ignore[index]
    rule = _RULES.get(base)
    op = overload_of(call.node.target)
    if rule is None and op is not None and is_view(op):
        rule = _linear
    if rule is None or op is None:
        call.only_zero()
        return 0
    degree = rule(call)
    for position in mutated_arguments(op):
        target = call.arguments.get(argument_names(op)[position])
        if isinstance(target, fx.Node) and call.degrees[target] != degree:
            raise DegreeRequired(target, 0, f"{call.name} writes other values into the stream")
    return degree


def _linear(call: ScaledCall) -> Degree:
    name = _LINEAR_IN.get(call.base) or next(iter(call.arguments))
    if call.base not in _LIKE:
        call.only_zero(name)
    if call.arguments.get("value") and call.base == "constant_pad_nd":
        raise DegreeRequired(call.node.all_input_nodes[0], 0, f"{call.name} pads the stream with a number")
    degree = call.of(name)
    result = call.node.meta.get("val")
    floats = not isinstance(result, torch.Tensor) or result.is_floating_point() or result.is_complex()
    if degree and (call.node.target is torch.ops.aten.view.dtype or not floats):
        if isinstance(result, torch.Tensor) and result.dtype is torch.bool:
            return 0  # what is zero stays zero
        raise DegreeRequired(
            call.node.all_input_nodes[0], 0, f"{call.name} makes integers, or bits, of the stream"
        )
    return degree


def _additive(call: ScaledCall) -> Degree:
    names = [name for name in _BOTH if name in call.arguments]
    call.only_zero(*names)
    return call.equal(*names)


def _product(call: ScaledCall) -> Degree:
    names = PRODUCTS[call.base]
    extra = [name for name in ("bias", "self") if name not in names and call.arguments.get(name) is not None]
    divisor = ["other"] if call.base == "div" else []
    call.only_zero(*names, *extra, *divisor)
    factors = [call.plain(item) for _, item in call.operands(*names)]
    degree = None if None in factors else sum(d for d in factors if d is not None)
    if divisor and degree is not None:
        degree -= call.of("other") or 0
        if call.arguments.get("rounding_mode") is not None and degree:
            raise DegreeRequired(call.node.all_input_nodes[0], 0, f"{call.name} rounds the stream")
    for _, added in call.operands(*extra):
        bias_degree = call.plain(added)
        if bias_degree not in (None, degree):
            if degree is None or not isinstance(added, fx.Node):
                return bias_degree
            raise DegreeRequired(added, degree, f"{call.name} adds a bias that does not scale")
    return degree


def _norm(call: ScaledCall) -> Degree:
    """Cancel the scale: statistics scale with the input, and only weight and bias scale the result."""
    statistics = ("running_mean", "running_var")
    call.only_zero("input", "weight", "bias", *statistics)
    degree = call.of("input") or 0
    running = [call.arguments.get(name) for name in statistics]
    if degree and running[0] is not None:
        if call.arguments.get("training") or call.arguments.get("use_input_stats"):
            raise DegreeRequired(call.arguments["input"], 0, f"{call.name} keeps statistics of the stream")
        for value, needed in zip(running, (degree, 2 * degree), strict=True):
            if isinstance(value, fx.Node) and call.degrees[value] != needed:
                raise DegreeRequired(
                    value, needed, f"{call.name} divides the stream by statistics that do not scale"
                )
    if degree:
        call.numbers["eps"] = 2 * degree
    result = call.of("weight") or 0
    bias = call.arguments.get("bias")
    if isinstance(bias, fx.Node) and call.degrees[bias] not in (None, result):
        raise DegreeRequired(bias, result, f"{call.name} adds a bias that does not scale")
    if call.base == "native_layer_norm":
        return result, degree, -degree
    return (result, -degree) if call.base == "_fused_rms_norm" else result


def _power(call: ScaledCall) -> Degree:
    exponent = call.arguments.get("exponent", _POWERS.get(call.base))
    call.only_zero("self")
    degree = call.of("self")
    if degree is None:
        call.only_zero()
        return None if isinstance(exponent, int | float) and exponent > 0 else 0
    power = degree * exponent if isinstance(exponent, int | float) and exponent in _EXACT_POWERS else 0.5
    if power != int(power):
        raise DegreeRequired(call.arguments["self"], 0, f"{call.name} takes a power of the stream")
    return int(power)


def _invariant(call: ScaledCall) -> Degree:
    call.only_zero(next(iter(call.arguments)))
    return 0


def _comparison(call: ScaledCall) -> Degree:
    call.only_zero("self", "other")
    call.equal("self", "other")
    return 0


def _ordered(call: ScaledCall) -> Degree:
    if "other" in call.arguments:
        return _additive(call)
    call.only_zero("self")
    degree = call.of("self")
    several = isinstance(call.node.meta.get("val"), list | tuple)
    return (degree, 0) if several else degree


def _clamp(call: ScaledCall) -> Degree:
    """Ignore a limit at the format's range, which the values stay below, and scale any other limit."""
    degree, bounds = call.of("self"), ("min", "max")
    if not degree:
        call.only_zero()
        return 0
    for name, bound in call.operands(*bounds):
        least = _lower_bound(bound)
        if least is not None and least >= _NEAR_LIMIT * call.limit:
            call.clamps = True
        elif not isinstance(bound, fx.Node):
            if bound:
                call.numbers[name] = degree
        elif call.degrees[bound] not in (None, degree):
            raise DegreeRequired(call.arguments["self"], 0, f"{call.name} limits the stream")
    return degree


def _nan_to_num(call: ScaledCall) -> Degree:
    """Treat ``nan_to_num`` as the identity, which it is for finite numbers."""
    if any(call.arguments.get(name) not in (None, 0.0) for name in ("nan", "posinf", "neginf")):
        raise DegreeRequired(call.arguments["self"], 0, f"{call.name} replaces some of the stream by numbers")
    call.clamps = True
    return call.of("self")


def _lower_bound(bound: Any) -> float | None:
    """Return the smallest magnitude that a limit can have; ``None`` if unknown."""
    if isinstance(bound, int | float):
        return abs(float(bound))
    op = overload_of(bound.target)
    base, arguments = "" if op is None else base_name(op), bound.args
    if base == "where":
        bounds = [_lower_bound(item) for item in arguments[1:]]
        return None if None in bounds else min(least for least in bounds if least is not None)
    if base in ("scalar_tensor", "neg", "to", "_to_copy", "full"):
        return _lower_bound(arguments[1 if base == "full" else 0])
    return None


_RULES: dict[str, Callable[[ScaledCall], Degree]] = {
    **dict.fromkeys(having("linear"), _linear),
    **dict.fromkeys(having("additive"), _additive),
    **dict.fromkeys(PRODUCTS, _product),
    **dict.fromkeys(having("normalizes"), _norm),
    **dict.fromkeys((*_POWERS, "pow"), _power),
    **dict.fromkeys(having("kind_of_number", "index_of_extreme"), _invariant),
    **dict.fromkeys(having("compares"), _comparison),
    **dict.fromkeys(having("orders"), _ordered),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max", "clip"), _clamp),
    "nan_to_num": _nan_to_num,
}
