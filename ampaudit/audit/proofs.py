"""Proves bounds, with or without a run, and searches for inputs that overflow (``--stress``)."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampaudit.audit.checks import CheckContext
from ampaudit.audit.config import ScanConfig
from ampaudit.bounds import Bound, BoundTable, bound
from ampaudit.bounds.analysis import assumptions, contains
from ampaudit.bounds.stored import format_of
from ampaudit.core import __version__
from ampaudit.core.assumptions import Assumption, parse_assumption
from ampaudit.core.errors import AuditError, InputError, ProofBroken
from ampaudit.core.session import Progress, silent
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_bound, format_number
from ampaudit.policy import RuleSet
from ampaudit.report.extrapolation import StressResult
from ampaudit.run.audit import Audit, run_audits
from ampaudit.run.backends import Float32Backend, choose_backend
from ampaudit.run.config import RunConfig
from ampaudit.run.measure import Observation
from ampaudit.run.program import Program, Step, compile_program
from ampaudit.run.record import RunRecord
from ampaudit.source import Batch, ModelSource
from ampaudit.source.inputs import save_inputs, with_tensors
from ampaudit.trace import Role, Site, TraceConfig, TracedModel, trace
from ampaudit.trace.capture import input_signature
from ampaudit.trace.converted import ConvertedModel, attach_weights
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.functional import functionalized
from ampaudit.trace.graph import Slot
from ampaudit.trace.path.recorder import refuse_path

_STARTS = 3  # of each search
_KEEP = -1  # in place of ids on which the value does not depend
_FIRST_STEP = 0.25  # as a share of the domain's width; halved after each step
SITES = 5
Leaves = list[list[torch.Tensor]]
Tables = dict[str, tuple[torch.Tensor, torch.Tensor]]  # by input that looks up: the table, and its rows


def prove(audit: Audit, batches: Sequence[Batch], run_config: RunConfig, config: ScanConfig) -> BoundTable:
    """Return the bounds that hold in every graph of an audit; a site is proved if it is proved in each.

    Raises:
        UsageError: An assumption names an input that the model does not have.
    """
    started = time.perf_counter()
    graphs = [converted.traced for converted in audit.graphs]
    names = [{p.name for p in traced.placeholders if p.slot is Slot.INPUT} for traced in graphs]
    stated = {text: parse_assumption(text)[0] for text in config.assume}
    known = frozenset().union(*names)
    domains = [
        assumptions(
            traced,
            _inputs(traced, batches),
            [text for text, name in stated.items() if name in mine or name not in known],
        )
        for traced, mine in zip(graphs, names, strict=True)
    ]
    common: dict[str, Assumption] = {}  # a range by name, which is the same in all graphs
    for each in (assumption for domain in domains for assumption in domain.values()):
        first = common.get(each.name, each)
        common[each.name] = replace(first, low=min(first.low, each.low), high=max(first.high, each.high))
    tables = [
        bound(traced, {node: common[each.name] for node, each in domain.items()}, run_config.number_format)
        for traced, domain in zip(graphs, domains, strict=True)
    ]
    audit.record.seconds["prove"] = time.perf_counter() - started
    return functools.reduce(BoundTable.joined, tables)


def _inputs(traced: TracedModel, batches: Sequence[Batch]) -> Leaves:
    """Return the inputs of the batches that have as many tensors as the graph takes."""
    count = len(traced.signature)
    alike = [batch for batch in batches if len(input_signature(batch.args, batch.kwargs)) == count]
    return [tensor_leaves(batch.args, batch.kwargs) for batch in alike]


def compare_with_run(context: CheckContext, batches: Sequence[Batch]) -> tuple[str, ...]:
    """Compare each bound with the run, or return a note if batches leave the ranges that proofs assume.

    Sites after the first broken one, or weight, are left out: proofs do not cover values after an overflow.

    Raises:
        ProofBroken: The run contradicts a proof.
    """
    table = context.bounds
    assert table is not None
    if not all(contains(table.assumed, traced, _inputs(traced, batches)) for traced in context.flow.traces):
        return ("the run checks no proof: its inputs are not all within the assumed ranges",)
    for site in context.sites:
        if context.from_weight(site) is not None:  # the run repairs it
            break
        proof, stats = table.bounds.get(site.id), context.record.observations.get(site.id)
        form = format_of(site.dtype)
        if proof is not None and stats is not None and form is not None:
            largest = proof.peak * (1 + form.eps) + form.min_subnormal
            if stats.peak > largest or (proof.proved and stats.bad):
                raise _broken(site, proof, stats)
        if site.id in context.origins:
            break
    return ()


def _broken(site: Site, proof: Bound, stats: Observation) -> ProofBroken:
    computed = (
        f"{stats.bad} values that are inf or NaN" if stats.bad else f"a value of {format_number(stats.peak)}"
    )
    what = f"{site.id} is proved not to exceed {format_bound(proof.peak)}, but the run computed {computed}"
    versions = f"ampaudit {__version__}, torch {torch.__version__}"
    where = f"{site.op}, output {tuple(site.shape)} in {site.dtype}, {versions}"
    hint = f"this is a defect of ampaudit; please report these lines ({where}) and, if possible, the model"
    return ProofBroken(f"internal error: {what}", hint=hint)


def static_audit(source: ModelSource, run_config: RunConfig) -> Audit:
    """Return an audit that is traced for the shapes of its batches but not run, with an empty record.

    Raises:
        AuditError: The model cannot be exported, or there is no batch to trace with.
    """
    if not source.batches:
        raise InputError("there is no batch", hint="--static runs nothing, but needs the inputs' shapes")
    started = time.perf_counter()
    rules: RuleSet | None = run_config.rules
    assert rules is not None
    setting = rules, run_config.author_rules, run_config.number_format
    shapes: dict[object, Batch] = {}
    for batch in source.batches:
        shapes.setdefault(input_signature(batch.args, batch.kwargs), batch)
    traces = [
        trace(source.model, b.args, b.kwargs, TraceConfig(*setting, seed=run_config.seed))
        for b in shapes.values()
    ]
    if rules.measured:
        note = "rules about measured values were not applied: nothing was run"
        traces[0] = replace(traces[0], notes=(*traces[0].notes, note))
    sites: dict[SiteId, Site] = {}
    for site in (site for traced in traces for site in traced.sites):
        sites.setdefault(site.id, site)
    backend = run_config.backend or choose_backend(run_config.device)
    record = RunRecord(device=run_config.device.type, backend=backend.name)
    record.seconds["trace"] = time.perf_counter() - started
    first, *others = map(attach_weights, traces)
    return Audit(record, tuple(sites.values()), first, frozenset(), others=tuple(others))


def search_overflows(
    source: ModelSource,
    audit: Audit,
    run_config: RunConfig,
    context: CheckContext,
    on_progress: Progress,
) -> tuple[StressResult, ...]:
    """Return one result per searched site, nearest the limit first; overflowing inputs are saved."""
    refuse_path(audit.converted.traced, "--stress")
    table, config = context.bounds, context.config
    assert table is not None
    by_name = {assumed.name: (assumed.low, assumed.high) for assumed in table.assumed}
    places = audit.converted.traced.placeholders
    domain = {place.node: by_name[place.name] for place in places if place.name in by_name}
    search = Search(audit.converted, domain, run_config.device)
    batch = source.batches[0]
    start = tensor_leaves(batch.args, batch.kwargs)
    results: list[StressResult] = []
    targets = list(_targets(context, table))
    for number, site in enumerate(targets):
        on_progress(f"stressing {site.id}", number, len(targets))
        tensors, peak = search.ascend(site.id, start, config.stress, config.seed + number)
        observed_peak = context.observed(site.id).ref_peak
        broken = _breaks(source, run_config, with_tensors(batch, tensors), site)
        saved = None
        if broken:
            name = re.sub(r"[^A-Za-z0-9._-]+", "_", site.id)
            path = Path(config.stress_dir) / f"overflow-{name}.safetensors"
            save_inputs(tensors, path)
            saved = str(path)
        results.append(StressResult(site.id, observed_peak, max(peak, observed_peak), broken, saved))
    return tuple(results)


def _targets(context: CheckContext, table: BoundTable) -> Sequence[Site]:
    """Return 16-bit sites that are neither proved nor broken, nearest the limit first."""
    candidates = [
        site
        for site in context.low_precision_sites
        if site.role in (Role.COMPUTE, Role.CAST, Role.INSERTED_CAST)
        and site.id not in table.proved
        and site.id not in context.broken_sites
        and site.id not in context.by_design
        and context.observed(site.id).elements
    ]
    return sorted(candidates, key=lambda site: -context.observed(site.id).ref_peak)[:SITES]


def _breaks(source: ModelSource, run_config: RunConfig, batch: Batch, site: Site) -> bool:
    """Return whether a run on an input gives inf or NaN at a site."""
    try:
        (audit,) = run_audits(source.model, [batch], [replace(run_config, measured={}, recorders=())], silent)
    except AuditError:
        return False
    stats = audit.record.observations.get(site.id)
    return stats is not None and stats.bad > 0


class Search:
    """Runs the FP32 reference of a converted model with gradients of its inputs.

    ``domain`` holds the lower and upper end of each input, by placeholder.
    """

    def __init__(
        self, converted: ConvertedModel, domain: Mapping[str, tuple[float, float]], device: torch.device
    ) -> None:
        self._program: Program = compile_program(functionalized(converted.traced), device)
        self._reference = Float32Backend()
        self._masters = {name: t.detach().to(device) for name, t in converted.masters.items()}
        places = [p for p in converted.traced.placeholders if p.slot is Slot.INPUT]
        self._inputs = [place.node for place in places]
        self._domain = [domain[place.node] for place in places]
        self._device = device

    def ascend(
        self, site: SiteId, start: Sequence[torch.Tensor], steps: int, seed: int
    ) -> tuple[list[torch.Tensor], float]:
        """Search for the input with the largest value at a site, starting from a batch; return both."""
        generator = torch.Generator().manual_seed(seed)
        best, best_peak = [t.clone() for t in start], -1.0
        each = max(steps // _STARTS, 1)
        for attempt in range(_STARTS):
            if attempt == 0:
                domain = zip(start, self._domain, strict=True)
                tensors = [t.clamp(*ends) if t.is_floating_point() else t for t, ends in domain]
            else:
                tensors = self._random(start, generator, attempt)
            size = _FIRST_STEP
            for step in range(each + 1):
                try:
                    peak, slopes = self._evaluate(site, tensors)
                except (RuntimeError, IndexError):
                    break  # an op refuses these integers, such as offsets that do not begin at 0
                if peak > best_peak:
                    best, best_peak = [t.clone() for t in tensors], peak
                if step < each:
                    last = step == each - 1
                    tensors = self._moved(tensors, slopes, 1.0 if last or step % 4 == 3 else size)
                    size = max(size / 2, 1 / 64)
        return best, best_peak

    def _random(
        self, like: Sequence[torch.Tensor], generator: torch.Generator, attempt: int
    ) -> list[torch.Tensor]:
        """Return a corner of the domain and a random point of it, alternately."""
        points: list[torch.Tensor] = []
        for tensor, (low, high) in zip(like, self._domain, strict=True):
            draw = torch.rand(tensor.shape, generator=generator)
            draw = (draw > 0.5).float() if attempt % 2 else draw
            value = low + draw * (high - low)
            value = value if tensor.is_floating_point() else value.round()
            points.append(value.to(tensor.dtype) if tensor.dtype is not torch.bool else tensor.clone())
        return points

    def _moved(
        self, tensors: Sequence[torch.Tensor], slopes: Sequence[torch.Tensor | None], size: float
    ) -> list[torch.Tensor]:
        points: list[torch.Tensor] = []
        for tensor, slope, (low, high) in zip(tensors, slopes, self._domain, strict=True):
            if slope is None:
                points.append(tensor)
            elif tensor.is_floating_point():
                points.append((tensor + slope.cpu().sign() * (high - low) * size).clamp(low, high))
            else:
                ids = slope.cpu().to(tensor.dtype)
                points.append(torch.where(ids == _KEEP, tensor, ids.clamp(int(low), int(high))))
        return points

    def _evaluate(
        self, site: SiteId, tensors: Sequence[torch.Tensor]
    ) -> tuple[float, list[torch.Tensor | None]]:
        """Return the peak at a site and, for each input, the gradient or the best ids."""
        values: dict[fx.Node, Any] = {}
        leaves: dict[str, torch.Tensor] = {}
        for node in self._program.inputs:
            if node.name in self._masters:
                values[node] = self._reference.represent(self._masters[node.name], None)
                continue
            tensor = tensors[self._inputs.index(node.name)].to(self._device)
            if tensor.is_floating_point():
                tensor = tensor.float().clone().requires_grad_()
                leaves[node.name] = tensor
            values[node] = tensor
        tables: Tables = {}
        with torch.enable_grad():
            for step in self._program.steps:
                values[step.node] = self._call(step, values, tables)
                if step.site is not None and step.site.id == site:
                    return self._slopes(values[step.node], leaves, tables)
        raise KeyError(site)

    def _call(self, step: Step, values: Mapping[fx.Node, Any], tables: Tables) -> Any:
        args, kwargs = self._reference.arguments(step)
        args, kwargs = fx.node.map_arg((args, kwargs), values.__getitem__)
        # no other step sees the hidden writes that are left, such as those of batch_norm
        if targets := {id(value) for value in step.written(args, kwargs)}:
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda value: value.clone() if id(value) in targets else value, (args, kwargs)
            )
        result = step.target(*args, **kwargs)
        source = step.node.args[1] if len(step.node.args) > 1 else None
        looked_up = str(step.target).startswith("aten.embedding.")
        if looked_up and isinstance(source, fx.Node) and source.name in self._inputs:
            result = result.detach().requires_grad_()
            tables[source.name] = (args[0], result)
        return result

    def _slopes(
        self, value: Any, leaves: dict[str, torch.Tensor], tables: Tables
    ) -> tuple[float, list[torch.Tensor | None]]:
        first = value[0] if isinstance(value, list | tuple) else value
        magnitude = first.abs().nan_to_num(0.0, torch.finfo(torch.float32).max).amax()
        sources = leaves | {name: rows for name, (_, rows) in tables.items()}
        slopes: dict[str, torch.Tensor | None] = dict.fromkeys(self._inputs)
        if sources and magnitude.requires_grad:
            gradients = torch.autograd.grad(magnitude, list(sources.values()), allow_unused=True)
            slopes |= dict(zip(sources, gradients, strict=True))
        for name, (table, _) in tables.items():
            if (gradient := slopes[name]) is not None:
                # of either sign: large negative values count as well
                best = (gradient @ table.t()).abs().argmax(-1)
                slopes[name] = torch.where(gradient.abs().amax(-1) > 0, best, _KEEP)
        return float(magnitude.detach()), [slopes[name] for name in self._inputs]
