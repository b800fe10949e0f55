"""Builds a plan from a converted model: decisions, casts and bytes, without a run."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from ampaudit.report.plan import (
    PlannedMemory,
    PlannedSegment,
    PlannedSite,
    PlannedWeights,
    PlanReport,
    RuleUse,
)
from ampaudit.run.program import Program, compile_program
from ampaudit.run.segments import Segment, cut_program
from ampaudit.trace.converted import ConvertedModel
from ampaudit.trace.graph import Role, Site, TracedModel
from ampaudit.trace.opnames import converts
from ampaudit.trace.values import LOW_PRECISION_DTYPES, dtype_name

__all__ = ["build_plan", "planned_memory", "planned_weights"]


def build_plan(
    converted: ConvertedModel, model: str, *, masters: bool, notes: tuple[str, ...] = ()
) -> PlanReport:
    """Return the plan of a converted model; ``masters`` is whether the policy keeps FP32 master weights."""
    traced = converted.traced
    floats = [site for site in traced.sites if site.dtype is not None]
    casts = _casts(converted)
    ops = [s for s in floats if not s.role.inserted]
    sites = tuple(_planned(site, casts.get(site.node, (0, 0))) for site in ops)
    computing = [s for s in ops if s.role is Role.COMPUTE]
    return PlanReport(
        model=model,
        policy=traced.policy,
        dtype=dtype_name(traced.dtype),
        sites=sites,
        rules=_rules(ops),
        lower=sum(s.dtype in LOW_PRECISION_DTYPES for s in computing),
        float32=sum(s.dtype is torch.float32 for s in computing),
        other=sum(s.dtype not in (*LOW_PRECISION_DTYPES, torch.float32) for s in computing),
        casts=sum(count for count, _ in casts.values()),
        cast_bytes=sum(size for _, size in casts.values()),
        author_casts=sum(s.role is Role.CAST for s in ops),
        weights=planned_weights(converted, masters),
        notes=traced.notes + notes,
    )


def _planned(site: Site, casts: tuple[int, int]) -> PlannedSite:
    decision = site.decision
    return PlannedSite(
        site=site.id,
        layer=site.layer,
        op=site.op,
        role=site.role.value,
        precision=dtype_name(site.dtype),
        rule=decision.rule,
        reason=decision.reason,
        why=decision.why,
        casts=casts[0],
        cast_bytes=casts[1],
    )


def _rules(sites: Iterable[Site]) -> tuple[RuleUse, ...]:
    counts: dict[str | None, RuleUse] = {}
    for site in sites:
        decision = site.decision
        use = counts.get(decision.rule)
        why = decision.why.partition(" (measured:")[0]
        counts[decision.rule] = RuleUse(
            decision.rule, decision.reason, why, use.sites + 1 if use is not None else 1
        )
    return tuple(sorted(counts.values(), key=lambda use: (use.rule is None, -use.sites)))


def _casts(converted: ConvertedModel) -> dict[str, tuple[int, int]]:
    """Count the casts inserted for each node, and the bytes that they move.

    A cast that several ops share is counted for the first.
    """
    nodes = {node.name: node for node in converted.traced.graph.nodes}
    counts: dict[str, tuple[int, int]] = {}
    for site in converted.traced.sites:
        if not site.role.inserted or site.dtype is None:
            continue
        node = nodes[site.node]
        first = next((user.name for user in node.users if user.op == "call_function"), "output")
        count, size = counts.get(first, (0, 0))
        counts[first] = (count + 1, size + _cast_bytes(node))
    return counts


def _cast_bytes(node: fx.Node) -> int:
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return int(before.numel() * before.element_size() + after.numel() * after.element_size())


def planned_weights(converted: ConvertedModel, masters: bool) -> PlannedWeights:
    """Return the bytes of a model's weights before and after conversion."""
    traced = converted.traced
    nodes = {node.name: node for node in traced.graph.nodes}
    before: dict[int, int] = {}
    after: dict[int, int] = {}
    master_sizes: dict[int, int] = {}
    read = {id(t) for name, t in traced.tensors.items() if name in nodes and nodes[name].users}
    for place in traced.placeholders:
        tensor = traced.tensors.get(place.node)
        if tensor is None or (id(tensor) in read and not nodes[place.node].users):
            continue  # no weight, or tied to one that is read under another name
        size = tensor.numel() * tensor.element_size()
        stored = _stored_size(nodes[place.node], place.dtype, tensor)
        before[id(tensor)] = size
        after[id(tensor)] = max(stored, after.get(id(tensor), 0))
        if after[id(tensor)] < size:
            master_sizes[id(tensor)] = size
    total = sum(master_sizes.values()) if masters else 0
    return PlannedWeights(sum(before.values()), sum(after.values()), total)


def planned_memory(traced: TracedModel, device: torch.device, limit: int, batches: int) -> PlannedMemory:
    """Return the segments that a model is cut into for a scan within a memory limit.

    Raises:
        UsageError: The limit is too low.
    """
    program = compile_program(traced, device)
    segments = cut_program(program, limit)
    return PlannedMemory(limit, batches, tuple(_planned_segment(program, segment) for segment in segments))


def _planned_segment(program: Program, segment: Segment) -> PlannedSegment:
    steps = (step for group in program.groups[segment.start :] for step in group)
    first = next((step.site.id for step in steps if step.site is not None and step.makes_values), "")
    return PlannedSegment(first, segment.weight_bytes, segment.value_bytes, segment.boundary_bytes)


def _stored_size(node: fx.Node, dtype: torch.dtype | None, tensor: torch.Tensor) -> int:
    """Return the bytes of a weight in the narrowest dtype that all of its uses accept."""
    itemsize = (dtype or tensor.dtype).itemsize
    uses = [user.meta.get("val") for user in node.users]
    if uses and all(converts(user.target) for user in node.users):
        itemsize = max(value.element_size() for value in uses if isinstance(value, torch.Tensor))
    return tensor.numel() * min(itemsize, tensor.element_size())
