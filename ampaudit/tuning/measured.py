"""Runs a model with everything in 16 bits, and derives the problem that ``tune`` solves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ampaudit.audit.sensitivity import sensitivities_in
from ampaudit.core.errors import UsageError
from ampaudit.core.sites import SiteId
from ampaudit.devices.catalogue import Device, all_devices
from ampaudit.devices.estimate import OpCost, OpCounter, cost_of, roofline_seconds
from ampaudit.devices.host import this_machine
from ampaudit.run.audit import Audit
from ampaudit.run.sensitivity.probe import PrecisionGraph
from ampaudit.trace.graph import Role, Slot, TracedModel, results_of
from ampaudit.trace.opnames import base_name, composite_kernel, example_size, is_foreign
from ampaudit.trace.values import CASTABLE_DTYPES, WIDE
from ampaudit.tuning.config import CostKind
from ampaudit.tuning.search import Prices, TuningProblem
from ampaudit.tuning.trials import Trials

__all__ = ["CostKind", "LowPrecisionRun", "costs_of", "default_device", "run_low_precision"]

_DEFAULT = "a100"  # fast in float16 and bfloat16 alike, and common
# ops that read only those elements of their first argument that they return
_GATHERS = frozenset({"embedding", "gather", "index", "index_select", "take", "take_along_dim"})
_EXTRA_BYTES = 2  # bytes by which a float32 element exceeds a 16-bit one
_CAST_BYTES = 6  # bytes moved to read an element in one format and write it in the other
MARGIN = 1.4  # factor by which 16-bit values must stay below the format's limit


@dataclass(frozen=True, slots=True)
class LowPrecisionRun:
    """A run with everything in 16 bits, and the means to run any other choice.

    Attributes:
        trials: Trials of the model in the 16-bit format.
        audit: Audit of the run.
        problem: Problem to solve.
        ranges: Reasons why values force ops and weights into float32, by name.
        appeared: Ops that exist only once their inputs are in float32; they stay in float32.
    """

    trials: Trials
    audit: Audit
    problem: TuningProblem
    ranges: Mapping[str, str]
    appeared: set[str] = field(default_factory=set)


def run_low_precision(trials: Trials) -> LowPrecisionRun:
    """Run a model under a policy that puts everything in 16 bits, and probe its outputs.

    Raises:
        AuditError: see ``run_audits``; an output has no gradient.
    """
    audit, config = trials.probe(), trials.config
    ranges, wide = _out_of_range(audit, trials.graph, trials.number_format.max)
    costs = costs_of(audit.converted.traced, config.cost, config.target)
    problem = TuningProblem(
        trials.graph,
        sensitivities_in(audit),
        _prices(audit, trials.graph, costs),
        frozenset(ranges),
        frozenset(wide),
    )
    return LowPrecisionRun(trials, audit, problem, ranges)


def _out_of_range(audit: Audit, graph: PrecisionGraph, limit: float) -> tuple[dict[str, str], set[str]]:
    """Return ops and weights that need float32 for their range, and the values that no cast may take."""
    record = audit.record
    masks = record.masks | record.by_design
    peaks = {site: stats.ref_peak for site, stats in record.observations.items()}
    ranges: dict[str, str] = {}
    wide: set[str] = set()
    for origin in record.origins:
        if origin.harms and origin.site in graph.values:
            ranges[origin.site] = "it gives infinity or NaN in 16 bits"
    for name, value in graph.values.items():
        # constants of the code, such as a mask's or finfo.max, need no margin
        single = value.site is not None and math.prod(value.site.shape) == 1
        most = limit if single or name in audit.parameter_free else limit / MARGIN
        peak = peaks.get(SiteId(name), 0.0)
        # a mask on values that are out of range hides that they are
        masked = name in masks and wide.isdisjoint(graph.reads.get(name, ()))
        if not value.is_weight and not masked and peak > most:
            wide.add(name)
            near = "" if peak > limit else "come near the limit: they "
            ranges[name] = f"its values {near}reach {peak:.4g}; 16 bits end at {limit:.6g}"
    masters = audit.converted.masters
    for place in audit.converted.traced.placeholders:
        tensor = masters.get(place.node)
        if (
            tensor is None
            or place.name not in graph.values
            or not tensor.is_floating_point()
            or not tensor.numel()
        ):
            continue
        peak = float(tensor.detach().abs().nan_to_num(0.0, math.inf, math.inf).amax())
        if limit < peak < math.inf and place.name not in masks:
            wide.add(place.name)
            ranges[place.name] = f"it holds {peak:.4g}; 16 bits end at {limit:.6g}"
    return ranges, wide


def _prices(audit: Audit, graph: PrecisionGraph, costs: Costs) -> Prices:
    """Return the costs keyed by the names of values."""
    nodes = {value.name: value.site.node for value in graph.values.values() if value.site is not None}
    nodes |= {place.name: place.node for place in audit.converted.traced.placeholders}
    values = {name: costs.ops[SiteId(name)] for name in graph.values if SiteId(name) in costs.ops}
    for name, node in nodes.items():
        if name not in values and name in graph.values:
            values[name] = costs.weights.get(node, 0.0)
    casts = {name: costs.casts.get(nodes[name], 0.0) for name in graph.values if name in nodes}
    return Prices(values, casts)


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of float32, in the unit of its kind: ops, bytes moved per pass, or seconds.

    Bytes and seconds are those of eager PyTorch: each op and each cast is a kernel of its own, which reads
    its inputs from memory and writes its outputs there. A compiler that fuses a cast makes it cheaper.

    Attributes:
        ops: Extra cost of running each site in float32 instead of 16 bits, never negative.
        casts: Cost of casting a node's value once, in either direction, for nodes whose values can be cast.
        weights: Extra cost of storing a weight in float32, by placeholder. Tied weights are counted once,
            under the first name that the graph reads.
        device: Device whose time is estimated; ``None`` for other kinds.
    """

    ops: Mapping[SiteId, float]
    casts: Mapping[str, float]
    weights: Mapping[str, float]
    device: Device | None = None


def costs_of(traced: TracedModel, kind: CostKind, device: Device | None = None) -> Costs:
    """Return the costs of float32 in a model that was traced in 16 bits.

    ``ops`` counts ops that compute or select. All casts together cost less than one of them, and all weights
    together less than one cast, so that these only choose among equal numbers of ops.

    ``bytes`` are those that an op reads and writes. Views and casts in the model's code follow their input
    and are free. A stored weight is charged the bytes that it adds, as if read once a pass.

    ``time`` is the roofline on a device: the longer of an op's arithmetic and its bytes, in float32 without
    TF32. A data-dependent size counts as 1.

    Args:
        traced: Model with everything in 16 bits; ops that are in float32 anyway cost nothing extra.
        kind: Unit of the costs.
        device: Device for ``time``; by default that of ``default_device``.

    Raises:
        UsageError: the catalogue lacks a rate of the device.
    """
    device = (device or default_device()) if kind == "time" else None
    price = _price(device)
    calls = _calls(traced)
    ops = {site: max(price(wide) - price(low), 0.0) for site, (low, wide) in calls.items()}
    casts = {node: price(_traffic(count * _CAST_BYTES)) for node, count in _castable(traced).items()}
    weights = {node: price(_traffic(count * _EXTRA_BYTES)) for node, count in _stored(traced).items()}
    if kind == "ops":
        ops = {site: float(extra > 0) for site, extra in ops.items()}
        cast = 0.5 / (len(casts) + 1)
        total = sum(weights.values()) or 1.0
        casts = dict.fromkeys(casts, cast)
        weights = {node: 0.5 * cast * extra / total for node, extra in weights.items()}
    return Costs(ops, casts, weights, device)


def default_device() -> Device:
    """Return the catalogue's entry for the GPU of this machine, or else for an A100."""
    entries = (device.entry for device in this_machine().devices if device.kind != "cpu")
    return all_devices()[next((entry for entry in entries if entry is not None), _DEFAULT)]


def _traffic(count: int) -> OpCost:
    """Return the cost of moving bytes without arithmetic."""
    return OpCost(flops=0, precision="float32", product=False, bytes_moved=count, cast=False)


def _seconds(op: OpCost, device: Device) -> float | None:
    return roofline_seconds([op], device, tf32=False)


def _price(device: Device | None) -> Callable[[OpCost], float]:
    """Return the seconds of an op on a device, or its bytes without one."""
    if device is None:
        return lambda op: float(op.bytes_moved)
    if _seconds(_traffic(1), device) is None:
        raise UsageError(
            f"the catalogue has no rates for {device.id}", hint="name a GPU, or minimise bytes or ops"
        )
    return lambda op: _seconds(op, device) or 0.0


def _calls(traced: TracedModel) -> dict[SiteId, tuple[OpCost, OpCost]]:
    """Return the cost of each site as traced and in float32."""
    low = {node.name: _on_meta(results_of(node)) for node in traced.graph.nodes}
    wide = {name: pytree.tree_map_only(torch.Tensor, _widen, value) for name, value in low.items()}
    nodes = {node.name: node for node in traced.graph.nodes}
    calls = {}
    for site in traced.sites:
        node = nodes[site.node]
        if site.role not in (Role.COMPUTE, Role.SELECT) or not _tensors(low[site.node]):
            calls[site.id] = (_traffic(0), _traffic(0))
            continue
        costs = [_call(node, values) for values in (low, wide)]
        flops = costs[0].flops or _composite_flops(node, low)
        before, after = (replace(cost, flops=flops, product=flops > 0) for cost in costs)
        calls[site.id] = (before, after)
    return calls


def _arguments(node: fx.Node, values: Mapping[str, Any]) -> tuple[Any, Any]:
    arguments: Any = map_arg((node.args, node.kwargs), lambda source: values[source.name])
    return arguments[0], arguments[1]


def _call(node: fx.Node, values: Mapping[str, Any]) -> OpCost:
    (args, kwargs), out = _arguments(node, values), values[node.name]
    if args and isinstance(node.target, OpOverload) and base_name(node.target) in _GATHERS:
        read = torch.empty_like(out) if out.numel() < args[0].numel() else args[0]
        args = (read, *args[1:])
    try:
        return cost_of(node.target, args, kwargs, out)
    except AssertionError:  # torch's formula: sizes that depend on the data do not fit together
        return cost_of(None, args, kwargs, out)


def _composite_flops(node: fx.Node, values: Mapping[str, Any]) -> int:
    """Count the arithmetic of the ops that a composite op calls: ``linear``, ``einsum``, attention."""
    op = node.target
    if not isinstance(op, OpOverload) or is_foreign(op) or composite_kernel(op) is None:
        return 0
    args, kwargs = _arguments(node, values)
    # an op that reads values, or has sizes that depend on them, may fail: what it did before counts
    unreadable = suppress(AssertionError, RuntimeError, TypeError, ValueError)
    with torch.no_grad(), OpCounter() as counter, unreadable:
        op(*args, **kwargs)
    return sum(cost.flops for cost in counter.ops)


def _on_meta(value: Any) -> Any:
    """Return traced values without data and symbols, of the sizes in this trace."""
    value = pytree.tree_map_only(torch.Tensor, _sized, value)
    return pytree.tree_map_only(torch.SymInt, _known, value)


def _sized(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of these sizes; dense, of a sparse one."""
    return torch.empty([_known(size) for size in tensor.shape], dtype=tensor.dtype, device="meta")


def _tensors(value: Any) -> list[torch.Tensor]:
    return [item for item in pytree.tree_leaves(value) if isinstance(item, torch.Tensor)]


def _known(symbol: Any) -> int:
    """Return the number that a symbol stands for in this trace, and 1 if it depends on the data."""
    number = example_size(symbol)
    return 1 if number is None else int(number)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(WIDE.get(tensor.dtype, tensor.dtype), copy=True)


def _castable(traced: TracedModel) -> dict[str, int]:
    """Count the elements that a cast of each node's value converts."""
    counts_by_node = {}
    for node in traced.graph.nodes:
        items = _tensors(_on_meta(node.meta.get("val")))
        counts = [item.numel() for item in items if item.dtype in CASTABLE_DTYPES]
        if counts:
            counts_by_node[node.name] = sum(counts)
    return counts_by_node


def _stored(traced: TracedModel) -> dict[str, int]:
    """Count the elements of each weight, of tied ones under the first name that the graph reads."""
    weights = [p for p in traced.placeholders if p.slot is not Slot.INPUT and p.dtype in CASTABLE_DTYPES]
    unread = {node.name: not node.users for node in traced.graph.nodes}
    sizes, counted = dict[str, int](), set[int]()
    for weight in sorted(weights, key=lambda weight: unread[weight.node]):
        tensor = traced.tensors[weight.node]
        sizes[weight.node] = 0 if id(tensor) in counted else tensor.numel()
        counted.add(id(tensor))
    return sizes
