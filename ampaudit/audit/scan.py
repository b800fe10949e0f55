"""``ampaudit scan``: which layers break in 16 bits, on real input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Unpack

from torch import nn

from ampaudit.audit.advise import advised
from ampaudit.audit.backward import differentiated
from ampaudit.audit.checks import ALL_CHECKS, Finding, run_checks
from ampaudit.audit.checks.interface import CheckContext
from ampaudit.audit.checks.suppress import comments_in, suppressed
from ampaudit.audit.context import context_of
from ampaudit.audit.inputs import Inputs, source_of
from ampaudit.audit.proofs import compare_with_run, prove, static_audit
from ampaudit.audit.scan_report import build_report, changed_verdicts
from ampaudit.audit.settings import ScanOptions, Settings
from ampaudit.audit.stress import stressed
from ampaudit.core.errors import InputError, UsageError
from ampaudit.core.formats import low_precision_format
from ampaudit.policy import RuleSet, load_policy
from ampaudit.report.model import ModelInfo, Report, RunInfo
from ampaudit.run.audit import Audit, RunConfig, run_audits
from ampaudit.run.contract import ContractBackend, parse_contract
from ampaudit.run.device import environment_of, pick_device
from ampaudit.source import ModelSource
from ampaudit.trace.isolation import preserved

__all__ = ["Audited", "audit_policies", "scan", "scan_policies", "scan_source"]


@dataclass(frozen=True, slots=True)
class Audited:
    """A report with what it is about: the audit under one policy, and that policy for the run's device."""

    report: Report
    audit: Audit
    rules: RuleSet


def scan(
    model: nn.Module,
    inputs: Inputs | None = None,
    *,
    batches: Iterable[Inputs] | None = None,
    policy: str | RuleSet = "ampaudit",
    dtype: str = "float16",
    **options: Unpack[ScanOptions],
) -> Report:
    """Audit a model in memory.

    Args:
        model: in the mode (``train()`` or ``eval()``) that is to be audited; it is not changed.
        inputs: one batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
        batches: several batches instead of one.
        policy: name of a shipped policy, path of a rule file, or a loaded rule set.
        dtype: ``float16`` or ``bfloat16``.
        **options: see ``Settings``.

    Raises:
        AuditError: see ``ampaudit.core.errors``.
    """
    if (inputs is None) == (batches is None):
        raise InputError(
            "give either inputs or batches", hint="scan(model, inputs) or scan(model, batches=[...])"
        )
    given = [inputs] if inputs is not None else list(batches or [])
    source = source_of(model, given)
    return scan_source(source, policy=policy, dtype=dtype, **options)


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
    **options: Unpack[ScanOptions],
) -> list[Report]:
    """Audit a loaded source under several policies, with one run of the FP32 reference for all of them."""
    return [found.report for found in audit_policies(source, policies, dtype, Settings(**options))]


@preserved()
def audit_policies(
    source: ModelSource, policies: Sequence[str | RuleSet], dtype: str, settings: Settings
) -> list[Audited]:
    """The same, with the audits themselves."""
    if settings.ranges and (settings.static or settings.prove):
        raise UsageError("--ranges runs FP32 alone", hint="leave out --static and --prove, or --ranges")
    form, where = low_precision_format(dtype), pick_device(settings.device)
    hidden = settings.hidden
    loaded = [p if isinstance(p, RuleSet) else load_policy(p) for p in policies]
    rule_sets = [rules.for_environment(environment_of(where)) for rules in loaded]
    author = load_policy("torch-cuda")
    subjects = [None if settings.ranges else rules for rules in rule_sets]
    plans = [
        RunConfig(
            rules,
            author,
            form,
            where,
            settings.seed,
            settings.backend,
            keep_graphs=settings.prove or settings.stress > 0,
            keep_outputs=settings.keep_outputs,
            release=source.release,
            min_sqnr=settings.min_sqnr,
        )
        for rules in subjects
    ]
    if settings.backward:
        source, plans = differentiated(source, plans, settings)
    contract = parse_contract(settings.contract)
    if contract.words and not (settings.static or settings.ranges):
        usual = [replace(plan, min_sqnr=None) for plan in plans]
        plans = [replace(plan, backend=ContractBackend(contract)) for plan in plans]
        both = run_audits(source.model, source.batches, [*plans, *usual], settings.told)
        audits, before = both[: len(plans)], both[len(plans) :]
    elif settings.static:
        audits, before = [static_audit(source, plan) for plan in plans], []
    else:
        audits, before = run_audits(source.model, source.batches, plans, settings.told), []
    made: list[Audited] = []
    for audit, rules, plan in zip(audits, rule_sets, plans, strict=True):
        asked = settings.prove or settings.static or settings.stress > 0
        table = prove(audit, source.batches, plan, settings) if asked else None
        context = context_of(audit, form, settings, table)
        if table is not None and not settings.static and not contract.words:
            compare_with_run(context, source.batches)
        found = run_checks(context, ALL_CHECKS)
        hiding = (*hidden, *comments_in(context.sites))
        shown = suppressed(found, hiding)
        if (settings.advise or settings.diff) and not settings.ranges and not settings.static:
            shown = advised(shown, source, plan, context, settings, hiding)
        report = _report(audit, context, shown, (source, rules, settings))
        if before:
            usual_context = context_of(before[len(made)], form, replace(settings, contract=""))
            report = replace(report, changed=changed_verdicts(usual_context, context, report))
        if settings.stress > 0 and not settings.static:
            report = replace(report, stressed=stressed(source, audit, plan, context, settings))
        made.append(Audited(report, audit, rules))
    return made


def _contract(audit: Audit, settings: Settings) -> str:
    native = audit.record.backend == "native" and not settings.static
    return "the device's own kernels" if native else parse_contract(settings.contract).text


def _report(
    audit: Audit,
    context: CheckContext,
    findings: tuple[Finding, ...],
    subject: tuple[ModelSource, RuleSet, Settings],
) -> Report:
    source, rules, settings = subject
    level: Literal["ranges", "scan", "static"] = "ranges" if settings.ranges else "scan"
    level = "static" if settings.static else level
    info = RunInfo(
        device=audit.record.device,
        backend="float32" if settings.ranges else audit.record.backend,
        dtype=context.number_format.name,
        policy="fp32" if settings.ranges else rules.name,
        batches=audit.record.batches,
        seed=settings.seed,
        level=level,
        contract=_contract(audit, settings),
        mode="train" if source.model.training else "eval",
    )
    model = ModelInfo(source.location, source.kind, source.sha256)
    return build_report(
        context, findings, audit.converted, model, info, settings.fail_on, promoted=audit.promoted
    )
