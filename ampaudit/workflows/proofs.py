"""The bound pass of a scan, and ``scan --static``: proofs without a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ampaudit.bounds import SpanTable, bound
from ampaudit.bounds.domain import assumptions
from ampaudit.convert import convert
from ampaudit.errors import InputError
from ampaudit.policy import RuleSet
from ampaudit.run.audit import Audit, Plan
from ampaudit.run.backends import choose_backend
from ampaudit.run.record import RunRecord
from ampaudit.source import Batch, ModelSource
from ampaudit.trace import TracedModel, trace
from ampaudit.trace.capture import input_signature
from ampaudit.trace.entry import tensor_leaves
from ampaudit.workflows.settings import Settings

__all__ = ["prove", "static_audit"]


def prove(audit: Audit, batches: Sequence[Batch], plan: Plan, settings: Settings) -> SpanTable:
    """Bounds for the graph of an audit's first batch; those of other shapes state ranges, too.

    Raises:
        UsageError: an assumption about an input that the model does not have.
    """
    started = time.perf_counter()
    traced = audit.converted.traced
    inputs = [tensor_leaves(batch.args, batch.kwargs) for batch in _alike(traced, batches)]
    domain = assumptions(traced, inputs, settings.assume)
    table = bound(traced, domain, plan.number_format)
    audit.record.seconds["prove"] = time.perf_counter() - started
    return table


def _alike(traced: TracedModel, batches: Sequence[Batch]) -> list[Batch]:
    """Batches with as many inputs as the graph, whatever their shapes."""
    first = len(traced.signature)
    return [batch for batch in batches if len(input_signature(batch.args, batch.kwargs)) == first]


def static_audit(source: ModelSource, plan: Plan) -> Audit:
    """An audit of a model that is traced and not run: its record is empty.

    Raises:
        AuditError: the model cannot be exported; there is no batch to show the shapes.
    """
    if not source.batches:
        raise InputError("there is no batch", hint="--static runs nothing, but needs the inputs' shapes")
    started = time.perf_counter()
    rules: RuleSet | None = plan.rules
    assert rules is not None
    batch = source.batches[0]
    setting = rules, plan.author_rules, plan.number_format
    traced = trace(source.model, batch.args, batch.kwargs, *setting, seed=plan.seed)
    if rules.measured:
        note = "rules about measured values were not applied: nothing was run"
        traced = replace(traced, notes=(*traced.notes, note))
    backend = plan.backend or choose_backend(plan.device)
    record = RunRecord(device=plan.device.type, backend=backend.name)
    record.seconds["trace"] = time.perf_counter() - started
    return Audit(record, traced.sites, convert(traced), frozenset())
