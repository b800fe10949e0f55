"""``ampaudit scan``: which layers break in 16 bits, on real input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypedDict, Unpack

from torch import nn

from ampaudit.checks import run_checks
from ampaudit.checks.interface import CheckContext
from ampaudit.errors import InputError
from ampaudit.formats import NumberFormat, lower_format
from ampaudit.policy import RuleSet, load_policy
from ampaudit.report.build import FailOn, build_report
from ampaudit.report.model import ModelInfo, Report, RunInfo
from ampaudit.run.audit import Audit, Plan, Progress, run_audits, silent
from ampaudit.run.backends import Backend
from ampaudit.run.weights import weight_ranges
from ampaudit.sites import SiteId
from ampaudit.source import ModelSource
from ampaudit.workflows.device import environment_of, pick_device
from ampaudit.workflows.inputs import Inputs, source_of

__all__ = ["scan", "scan_policies", "scan_source"]


def scan(
    model: nn.Module,
    inputs: Inputs | None = None,
    *,
    batches: Iterable[Inputs] | None = None,
    policy: str | RuleSet = "ampaudit",
    dtype: str = "float16",
    device: str = "auto",
    seed: int = 0,
    ranges: bool = False,
    min_headroom: float = 1.0,
    fail_on: FailOn = "error",
) -> Report:
    """Audit a model in memory.

    Args:
        model: in the mode (``train()`` or ``eval()``) that is to be audited; it is not changed.
        inputs: one batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
        batches: several batches instead of one.
        policy: name of a shipped policy, path of a rule file, or a loaded rule set.
        dtype: ``float16`` or ``bfloat16``.
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: of the random numbers that the model draws.
        ranges: only run FP32 and say what each format would do to its values.
        min_headroom: bits below which a healthy site is reported as a warning.
        fail_on: severity from which ``report.exit_code`` is 1.

    Raises:
        AuditError: see ``ampaudit.errors``.
    """
    if (inputs is None) == (batches is None):
        raise InputError(
            "give either inputs or batches", hint="scan(model, inputs) or scan(model, batches=[...])"
        )
    given = [inputs] if inputs is not None else list(batches or [])
    source = source_of(model, given)
    return scan_source(
        source,
        policy=policy,
        dtype=dtype,
        device=device,
        seed=seed,
        ranges=ranges,
        min_headroom=min_headroom,
        fail_on=fail_on,
    )


class ScanOptions(TypedDict, total=False):
    """The options of ``scan_policies`` that have a default."""

    device: str
    seed: int
    ranges: bool
    min_headroom: float
    fail_on: FailOn
    progress: Progress | None
    backend: Backend | None


def scan_source(
    source: ModelSource, *, policy: str | RuleSet, dtype: str, **options: Unpack[ScanOptions]
) -> Report:
    """Audit a loaded source under one policy."""
    return scan_policies(source, policies=[policy], dtype=dtype, **options)[0]


def scan_policies(
    source: ModelSource,
    *,
    policies: Sequence[str | RuleSet],
    dtype: str,
    device: str = "auto",
    seed: int = 0,
    ranges: bool = False,
    min_headroom: float = 1.0,
    fail_on: FailOn = "error",
    progress: Progress | None = None,
    backend: Backend | None = None,
) -> list[Report]:
    """Audit a loaded source under several policies, with one run of the FP32 reference for all of them."""
    form = lower_format(dtype)
    where = pick_device(device)
    loaded = [p if isinstance(p, RuleSet) else load_policy(p) for p in policies]
    rule_sets = [rules.within(environment_of(where)) for rules in loaded]
    author = load_policy("torch-cuda")
    subjects = [None if ranges else rules for rules in rule_sets]
    plans = [Plan(rules, author, form, where, seed=seed, backend=backend) for rules in subjects]
    audits = run_audits(source.model, source.batches, plans, progress or silent)
    return [
        _report(audit, source, rules, plan, min_headroom, fail_on)
        for audit, rules, plan in zip(audits, rule_sets, plans, strict=True)
    ]


def _report(
    audit: Audit, source: ModelSource, rules: RuleSet, plan: Plan, min_headroom: float, fail_on: FailOn
) -> Report:
    ranges = plan.rules is None
    context = _context(audit, plan.number_format, min_headroom, ranges)
    level: Literal["ranges", "scan"] = "ranges" if ranges else "scan"
    info = RunInfo(
        device=audit.record.device,
        backend="float32" if ranges else audit.record.backend,
        dtype=plan.number_format.name,
        policy="fp32" if ranges else rules.name,
        batches=audit.record.batches,
        seed=plan.seed,
        level=level,
        mode="train" if source.model.training else "eval",
    )
    model = ModelInfo(source.location, source.kind, source.sha256)
    found = run_checks(context)
    return build_report(context, found, audit.converted, model, info, fail_on, raised=audit.raised)


def _context(audit: Audit, form: NumberFormat, min_headroom: float, ranges: bool) -> CheckContext:
    return CheckContext(
        sites=audit.sites,
        record=audit.record,
        number_format=form,
        parameter_free=audit.parameter_free,
        weights=() if ranges else weight_ranges(audit.converted, _weight_peaks(audit)),
        users=_weight_users(audit),
        min_headroom=min_headroom,
        ranges_only=ranges,
    )


def _weight_peaks(audit: Audit) -> dict[str, float]:
    """Peaks of the weights that are cast in the graph: the run measured them."""
    seen = audit.record.observations
    return {s.weight: seen[s.id].ref_peak for s in audit.sites if s.weight is not None and s.id in seen}


def _weight_users(audit: Audit) -> dict[SiteId, tuple[str, ...]]:
    """For each site, the weights held in 16 bits that it uses directly."""
    copies = {copy.node: copy.name for copy in audit.converted.copies.values()}
    nodes = {node.name: node for node in audit.converted.traced.graph.nodes}
    return {
        site.id: tuple(copies[used.name] for used in nodes[site.node].all_input_nodes if used.name in copies)
        for site in audit.converted.traced.sites
    }
