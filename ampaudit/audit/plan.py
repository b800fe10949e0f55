"""``ampaudit plan``: shows what a policy does to a model, or compares two policies."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ampaudit.audit.config import PlanConfig, rules_of
from ampaudit.audit.inputs import Inputs, ModelLike, as_source
from ampaudit.core.config import with_options
from ampaudit.core.formats import NumberFormat, low_precision_format
from ampaudit.core.session import DEFAULT_SESSION, Progress, Session, silent
from ampaudit.core.sites import SiteId
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.text import parse_size, plural
from ampaudit.policy import Measurement, RuleSet, load_policy
from ampaudit.report.model import of_made_up
from ampaudit.report.plan import (
    PlannedMemory,
    PlannedSegment,
    PlannedSite,
    PlannedWeights,
    PlanReport,
    RuleUse,
)
from ampaudit.run.audit import measure, promoted_sites
from ampaudit.run.config import RunConfig
from ampaudit.run.device import environment_of, pick_device
from ampaudit.run.program import Program, compile_program
from ampaudit.run.segments import Segment, cut_program
from ampaudit.source import ModelSource
from ampaudit.source.dequantize import with_plain_weights
from ampaudit.source.twins import using_twins
from ampaudit.trace import TraceConfig, trace
from ampaudit.trace.converted import ConvertedModel, attach_weights, casts_of
from ampaudit.trace.graph import Role, Site, TracedModel
from ampaudit.trace.isolation import isolated
from ampaudit.trace.path.recorder import PathTracing
from ampaudit.trace.values import LOW_PRECISION_DTYPES, UNKNOWN_SIZE, dtype_name, sizes_of


@with_options(PlanConfig)
@isolated()
def plan(
    model: ModelLike,
    inputs: Inputs | None = None,
    *,
    source: SourceConfig | None = None,
    config: PlanConfig | None = None,
    session: Session = DEFAULT_SESSION,
    **options: Any,
) -> PlanReport:
    """Show what a policy does to each op, for the shapes of the first batch; nothing is run in 16 bits.

    For a policy with measured rules, the batches are run once in FP32.

    Args:
        model: Model in the mode to audit (``train()`` or ``eval()``), which is not changed; or its location:
            a path, or ``package.module:factory``.
        inputs: One batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
        source: Options to load a model from its location: weights, inputs, ``trust`` ...
        config: Options as one record.
        session: Context of the call; only ``on_progress`` is used.
        **options: Fields of ``PlanConfig``, which override those of ``config``.

    Returns:
        The plan: each op's precision and the rule behind it, casts, bytes, and weight memory.

    Raises:
        AuditError: See ``ampaudit.core.errors``.
    """
    config = PlanConfig.merged(config, options)
    config.check()
    opened = as_source(model, inputs, options=source or SourceConfig(seed=config.seed))
    opened = with_plain_weights(opened)
    form, where = low_precision_format(config.dtype), pick_device(config.device, audits=True)
    rules = rules_of(config.policy).for_environment(environment_of(where))
    with using_twins(config.twins):
        traced, notes = trace_under(opened, rules, form, where, config.seed, session.on_progress)
    weights = planned_weights(attach_weights(traced), rules.file.weights.master)
    report = _plan(traced, opened.location, weights, (*traced.notes, *opened.notes, *notes))
    if not config.memory:
        return report
    limit, program = parse_size(config.memory), compile_program(traced, where)
    segments = tuple(_planned_segment(program, segment) for segment in cut_program(program, limit))
    return replace(report, memory=PlannedMemory(limit, len(opened.batches), segments))


def trace_under(
    source: ModelSource,
    rules: RuleSet,
    form: NumberFormat,
    where: torch.device,
    seed: int = 0,
    on_progress: Progress = silent,
) -> tuple[TracedModel, tuple[str, ...]]:
    """Trace the first batch under a policy, after an FP32 run if rules need measurements; with notes.

    Raises:
        AuditError: See ``ampaudit.core.errors``.
    """
    author = load_policy("torch-cuda")
    measurements: dict[SiteId, Measurement] = {}
    notes: tuple[str, ...] = ()
    if rules.measured:
        setting = RunConfig(rules, author, form, where, seed, reference_only=True)
        measurements, sites = measure(source.model, source.batches, setting, on_progress)
        promoted = plural(len(promoted_sites(rules, sites, measurements)), "site")
        count = len(source.batches)
        batches = ("1 batch" if count == 1 else f"{count} batches") + of_made_up(source.inputs)
        notes = (f"{promoted} promoted by measured rules, after {batches} in FP32",)
    batch = source.batches[0]
    config = TraceConfig(rules, author, form, measurements, seed=seed, path=PathTracing.FALLBACK)
    return trace(source.model, batch.args, batch.kwargs, config), notes


def _plan(traced: TracedModel, model: str, weights: PlannedWeights, notes: tuple[str, ...]) -> PlanReport:
    casts, unsized = _casts(traced)
    if unsized:
        uncounted = f"the bytes of {plural(unsized, 'cast')} depend on the values of the inputs: not counted"
        notes = (*notes, uncounted)
    ops = [site for site in traced.sites if site.dtype is not None and not site.role.inserted]
    sites = tuple(
        PlannedSite(
            site=site.id,
            layer=site.layer,
            op=site.op,
            role=site.role.value,
            precision=dtype_name(site.dtype),
            rule=site.decision.rule,
            reason=site.decision.reason,
            why=site.decision.why,
            casts=casts[site.node][0],
            cast_bytes=casts[site.node][1],
        )
        for site in ops
    )
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
        weights=weights,
        notes=notes,
    )


def _rules(sites: Sequence[Site]) -> tuple[RuleUse, ...]:
    decisions = {site.decision.rule: site.decision for site in sites}
    counts = Counter(site.decision.rule for site in sites)
    uses = (
        RuleUse(rule, decision.reason, decision.why.partition(" (measured:")[0], counts[rule])
        for rule, decision in decisions.items()
    )
    return tuple(sorted(uses, key=lambda use: (use.rule is None, -use.sites)))


def _casts(traced: TracedModel) -> tuple[defaultdict[str, tuple[int, int]], int]:
    """Count the casts inserted for each node with the bytes that they move, and those of unknown size.

    A cast that several ops share is counted for the first.
    """
    nodes = {node.name: node for node in traced.graph.nodes}
    counts: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    unsized = 0
    for site in traced.sites:
        if site.role.inserted and site.dtype is not None:
            node = nodes[site.node]
            first = next((user.name for user in node.users if user.op == "call_function"), "output")
            count, size = counts[first]
            sizes = sizes_of(node.meta["val"])
            per_element = sum(n.meta["val"].element_size() for n in (node.all_input_nodes[0], node))
            known = UNKNOWN_SIZE not in sizes
            unsized += not known
            counts[first] = count + 1, size + (math.prod(sizes) * per_element if known else 0)
    return counts, unsized


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
        itemsize = (place.dtype or tensor.dtype).itemsize
        if casts := casts_of(nodes[place.node], traced.site_of_node):  # the narrowest dtype that all accept
            itemsize = min(itemsize, max(cast.meta["val"].element_size() for cast in casts))
        stored = tensor.numel() * min(itemsize, tensor.element_size())
        before[id(tensor)] = size
        after[id(tensor)] = max(stored, after.get(id(tensor), 0))
        if after[id(tensor)] < size:
            master_sizes[id(tensor)] = size
    total = sum(master_sizes.values()) if masters else 0
    return PlannedWeights(sum(before.values()), sum(after.values()), total)


def _planned_segment(program: Program, segment: Segment) -> PlannedSegment:
    steps = (step for group in program.groups[segment.start :] for step in group)
    first = next((step.site.id for step in steps if step.site is not None and step.makes_values), "")
    return PlannedSegment(first, segment.weight_bytes, segment.value_bytes, segment.boundary_bytes)
