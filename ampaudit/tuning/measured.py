"""Runs a model with everything in 16 bits, and states from what it shows what is to be chosen."""

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
from ampaudit.run.sensitivity.precision_graph import PrecisionGraph
from ampaudit.trace.graph import Role, Slot, TracedModel
from ampaudit.trace.opnames import base_name, composite_kernel, example_size, is_foreign
from ampaudit.trace.site_table import results_of
from ampaudit.trace.values import CASTABLE_DTYPES, WIDE
from ampaudit.tuning.config import CostKind
from ampaudit.tuning.problem import Prices, TuningProblem
from ampaudit.tuning.trials import Trials

__all__ = ["CostKind", "LowPrecisionRun", "costs_of", "default_device", "run_low_precision"]

_DEFAULT = "a100"  # fast in float16 and bfloat16 alike, and common
# ops that read only those elements of their first argument that they return
_GATHERS = frozenset({"embedding", "gather", "index", "index_select", "take", "take_along_dim"})
_EXTRA_BYTES = 2  # of an element in float32 over one in 16 bits
_CAST_BYTES = 6  # an element read in one format and written in the other
MARGIN = 1.4  # that values must keep to the format's limit to be in 16 bits


@dataclass(frozen=True, slots=True)
class LowPrecisionRun:
    """A run with everything in 16 bits, and the means to run any other choice.

    Attributes:
        trials: of the model in the 16-bit format.
        audit: of the run.
        problem: what is to be chosen.
        ranges: ops and weights that must be in float32 because of their values, with the reason in words.
        appeared: ops that are in a trace only once their inputs are in float32; they are to stay there.
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
    """Return what must be in float32 because of its values, and the values that no cast may take."""
    record = audit.record
    masks = record.masks | record.by_design
    peaks = {site: seen.ref_peak for site, seen in record.observations.items()}
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
        known = graph.values.get(place.name)
        if tensor is None or known is None or not tensor.is_floating_point() or not tensor.numel():
            continue
        peak = float(tensor.detach().abs().nan_to_num(0.0, math.inf, math.inf).amax())
        if limit < peak < math.inf and place.name not in masks:
            wide.add(place.name)
            ranges[place.name] = f"it holds {peak:.4g}; 16 bits end at {limit:.6g}"
    return ranges, wide


def _prices(audit: Audit, graph: PrecisionGraph, costs: Costs) -> Prices:
    """Return the costs under the names of values."""
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
    """What float32 costs, in the unit of its kind: ops, bytes moved per pass, or seconds.

    Bytes and seconds are those of eager PyTorch: each op and each cast is a kernel of its own, which reads
    its inputs from memory and writes its outputs there. A compiler that fuses a cast makes it cheaper.

    Attributes:
        ops: extra cost of running a site in float32 instead of 16 bits; of every site, and never negative.
        casts: cost of casting the value of a node once, in either direction; of nodes with such a value.
        weights: extra cost of storing a weight in float32, by placeholder. Tied weights have it once, under
            the first name that the graph reads.
        device: the device whose time it is; ``None`` for other kinds.
    """

    ops: Mapping[SiteId, float]
    casts: Mapping[str, float]
    weights: Mapping[str, float]
    device: Device | None = None


def costs_of(traced: TracedModel, kind: CostKind, device: Device | None = None) -> Costs:
    """Return what float32 costs in a model that was traced in 16 bits.

    ``ops`` counts ops that compute or select. All casts together cost less than one of them, and all weights
    together less than one cast, so that these only choose among equal numbers of ops.

    ``bytes`` are those that an op reads and writes. Views and casts in the model's code follow their input
    and are free. A stored weight is charged the bytes that it adds, as if read once a pass.

    ``time`` is the roofline on a device: the longer of an op's arithmetic and its bytes, in float32 without
    TF32. A data-dependent size counts as 1.

    Args:
        traced: the model, with everything in 16 bits; what is in float32 all the same costs no more.
        kind: the unit.
        device: for ``time``; ``default_device`` without it.

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
    entries = (own.entry for own in this_machine().devices if own.kind != "cpu")
    return all_devices()[next((entry for entry in entries if entry is not None), _DEFAULT)]


def _traffic(moved: int) -> OpCost:
    """Return the cost of moving bytes without arithmetic."""
    return OpCost(flops=0, precision="float32", product=False, moved=moved, cast=False)


def _seconds(op: OpCost, device: Device) -> float | None:
    return roofline_seconds([op], device, tf32=False)


def _price(device: Device | None) -> Callable[[OpCost], float]:
    """Return the seconds of an op on a device, or its bytes without one."""
    if device is None:
        return lambda op: float(op.moved)
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
    found = {}
    for site in traced.sites:
        node = nodes[site.node]
        if site.role not in (Role.COMPUTE, Role.SELECT) or not _tensors(low[site.node]):
            found[site.id] = (_traffic(0), _traffic(0))
            continue
        costs = [_call(node, values) for values in (low, wide)]
        flops = costs[0].flops or _composite_flops(node, low)
        before, after = (replace(cost, flops=flops, product=flops > 0) for cost in costs)
        found[site.id] = (before, after)
    return found


def _arguments(node: fx.Node, values: Mapping[str, Any]) -> tuple[Any, Any]:
    found: Any = map_arg((node.args, node.kwargs), lambda source: values[source.name])
    return found[0], found[1]


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
    found = {}
    for node in traced.graph.nodes:
        items = _tensors(_on_meta(node.meta.get("val")))
        counts = [item.numel() for item in items if item.dtype in CASTABLE_DTYPES]
        if counts:
            found[node.name] = sum(counts)
    return found


def _stored(traced: TracedModel) -> dict[str, int]:
    """Count the elements of each weight, of tied ones under the first name that the graph reads."""
    weights = [p for p in traced.placeholders if p.slot is not Slot.INPUT and p.dtype in CASTABLE_DTYPES]
    unread = {node.name: not node.users for node in traced.graph.nodes}
    found, seen = dict[str, int](), set[int]()
    for weight in sorted(weights, key=lambda weight: unread[weight.node]):
        tensor = traced.tensors[weight.node]
        found[weight.node] = 0 if id(tensor) in seen else tensor.numel()
        seen.add(id(tensor))
    return found
