"""Proves bounds in a scan, and without a run for ``scan --static``."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from ampaudit.audit.checks import CheckContext
from ampaudit.audit.config import ScanConfig
from ampaudit.bounds import Bound, BoundTable, bound
from ampaudit.bounds.domain import assumptions, contains
from ampaudit.bounds.stored import format_of
from ampaudit.core.errors import InputError, ProofBroken
from ampaudit.core.sites import SiteId
from ampaudit.core.text import format_number
from ampaudit.core.version import __version__
from ampaudit.policy import RuleSet
from ampaudit.run.audit import Audit, RunConfig
from ampaudit.run.backends import choose_backend
from ampaudit.run.observation import Observation
from ampaudit.run.record import RunRecord
from ampaudit.source import Batch, ModelSource
from ampaudit.trace import Site, TracedModel, trace
from ampaudit.trace.capture import input_signature
from ampaudit.trace.converted import attach_weights
from ampaudit.trace.entry import tensor_leaves

__all__ = ["compare_with_run", "prove", "static_audit"]

Leaves = list[list[torch.Tensor]]


def prove(audit: Audit, batches: Sequence[Batch], plan: RunConfig, settings: ScanConfig) -> BoundTable:
    """Return the bounds that hold in every graph of an audit; a site is proved if it is proved in each.

    Raises:
        UsageError: An assumption names an input that the model does not have.
    """
    started = time.perf_counter()
    tables = []
    for converted in audit.every:
        traced = converted.traced
        domain = assumptions(traced, _inputs(traced, batches), settings.assume)
        tables.append(bound(traced, domain, plan.number_format))
    audit.record.seconds["prove"] = time.perf_counter() - started
    return functools.reduce(BoundTable.joined, tables)


def _inputs(traced: TracedModel, batches: Sequence[Batch]) -> Leaves:
    """Return the inputs of the batches that have as many tensors as the graph takes."""
    count = len(traced.signature)
    alike = [batch for batch in batches if len(input_signature(batch.args, batch.kwargs)) == count]
    return [tensor_leaves(batch.args, batch.kwargs) for batch in alike]


def compare_with_run(context: CheckContext, batches: Sequence[Batch]) -> None:
    """Compare each bound with the run, if the batches satisfy the proofs' assumptions.

    Sites after the first broken one are left out: proofs do not cover values after an overflow.

    Raises:
        ProofBroken: The run contradicts a proof.
    """
    table = context.bounds
    assert table is not None
    if not all(contains(table.assumed, traced, _inputs(traced, batches)) for traced in context.flow.every):
        return
    for site in context.sites:
        proof, stats = table.bounds.get(site.id), context.record.observations.get(site.id)
        form = format_of(site.dtype)
        if proof is not None and stats is not None and form is not None:
            largest = proof.peak * (1 + form.eps) + form.min_subnormal
            if stats.peak > largest or (proof.proved and stats.bad):
                raise _broken(site, proof, stats)
        if site.id in context.origin_sites:
            break


def _broken(site: Site, proof: Bound, stats: Observation) -> ProofBroken:
    computed = (
        f"{stats.bad} values that are inf or NaN" if stats.bad else f"a value of {format_number(stats.peak)}"
    )
    what = f"{site.id} is proved to stay below {format_number(proof.peak)}, but the run computed {computed}"
    versions = f"ampaudit {__version__}, torch {torch.__version__}"
    where = f"{site.op}, output {tuple(site.shape)} in {site.dtype}, {versions}"
    hint = f"this is a defect of ampaudit; please report these lines ({where}) and, if possible, the model"
    return ProofBroken(f"internal error: {what}", hint=hint)


def static_audit(source: ModelSource, plan: RunConfig) -> Audit:
    """Return an audit that is traced for the shapes of its batches but not run, with an empty record.

    Raises:
        AuditError: The model cannot be exported, or there is no batch to trace with.
    """
    if not source.batches:
        raise InputError("there is no batch", hint="--static runs nothing, but needs the inputs' shapes")
    started = time.perf_counter()
    rules: RuleSet | None = plan.rules
    assert rules is not None
    setting = rules, plan.author_rules, plan.number_format
    shapes: dict[object, Batch] = {}
    for batch in source.batches:
        shapes.setdefault(input_signature(batch.args, batch.kwargs), batch)
    traces = [trace(source.model, b.args, b.kwargs, *setting, seed=plan.seed) for b in shapes.values()]
    if rules.measured:
        note = "rules about measured values were not applied: nothing was run"
        traces[0] = replace(traces[0], notes=(*traces[0].notes, note))
    sites: dict[SiteId, Site] = {}
    for site in (site for traced in traces for site in traced.sites):
        sites.setdefault(site.id, site)
    backend = plan.backend or choose_backend(plan.device)
    record = RunRecord(device=plan.device.type, backend=backend.name)
    record.seconds["trace"] = time.perf_counter() - started
    first, *others = map(attach_weights, traces)
    return Audit(record, tuple(sites.values()), first, frozenset(), others=tuple(others))
