"""``ampaudit scan``: finds the layers that break in 16 bits, on real input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Unpack

from ampaudit.audit.advise import advised
from ampaudit.audit.backward import differentiated
from ampaudit.audit.checks import ALL_CHECKS, Finding, run_checks
from ampaudit.audit.checks.interface import CheckContext
from ampaudit.audit.checks.suppress import comments_in, option, suppressed
from ampaudit.audit.config import Rules, ScanConfig, ScanOptions, rules_of
from ampaudit.audit.context import context_of
from ampaudit.audit.inputs import Inputs, ModelLike, as_source
from ampaudit.audit.proofs import compare_with_run, prove, static_audit
from ampaudit.audit.scan_report import build_report, changed_verdicts
from ampaudit.audit.stress import stressed
from ampaudit.core.errors import UsageError
from ampaudit.core.formats import low_precision_format
from ampaudit.policy import RuleSet, load_policy
from ampaudit.report.model import ModelInfo, Report, RunInfo
from ampaudit.run.audit import Audit, RunConfig, run_audits
from ampaudit.run.contract import ContractBackend, parse_contract
from ampaudit.run.device import environment_of, pick_device
from ampaudit.source import ModelSource
from ampaudit.trace.isolation import preserved

__all__ = ["Audited", "audit_policies", "scan", "scan_policies"]


@dataclass(frozen=True, slots=True)
class Audited:
    """A report with its audit and its policy for the run's device."""

    report: Report
    audit: Audit
    rules: RuleSet


def scan(
    model: ModelLike,
    inputs: Inputs | None = None,
    *,
    batches: Iterable[Inputs] | None = None,
    config: ScanConfig | None = None,
    **options: Unpack[ScanOptions],
) -> Report:
    """Run a model in FP32 and in 16 bits side by side, and name what breaks.

    Args:
        model: the model, in the mode to audit (``train()`` or ``eval()``), which is not changed; or its
            location: a path, or ``package.module:factory``.
        inputs: one batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs.
        batches: several batches instead of one.
        config: the options as one record.
        **options: fields of ``ScanConfig``, which override those of ``config``.

    Returns:
        The report: findings, sites, outputs, and a verdict.

    Raises:
        AuditError: see ``ampaudit.core.errors``.
    """
    chosen = ScanConfig.given(config, options)
    return scan_policies(as_source(model, inputs, batches), [chosen.policy], chosen)[0]


def scan_policies(source: ModelSource, policies: Sequence[Rules], config: ScanConfig) -> list[Report]:
    """Audit a loaded source under several policies, with one run of the FP32 reference for all of them."""
    return [found.report for found in audit_policies(source, policies, config)]


@preserved()
def audit_policies(source: ModelSource, policies: Sequence[Rules], config: ScanConfig) -> list[Audited]:
    """Audit a loaded source under several policies, and return the audits with their reports."""
    if config.ranges and (config.static or config.prove):
        raise UsageError("--ranges runs FP32 alone", hint="leave out --static and --prove, or --ranges")
    form, where = low_precision_format(config.dtype), pick_device(config.device)
    hidden = tuple(map(option, config.ignore))
    rule_sets = [rules_of(policy).for_environment(environment_of(where)) for policy in policies]
    author = load_policy("torch-cuda")
    subjects = [None if config.ranges else rules for rules in rule_sets]
    plans = [
        RunConfig(
            rules,
            author,
            form,
            where,
            config.seed,
            config.backend,
            keep_graphs=config.prove or config.stress > 0,
            keep_outputs=config.keep_outputs,
            release=source.release,
            min_sqnr=config.min_sqnr,
        )
        for rules in subjects
    ]
    if config.backward:
        source, plans = differentiated(source, plans, config)
    contract = parse_contract(config.contract)
    if contract.words and not (config.static or config.ranges):
        usual = [replace(plan, min_sqnr=None) for plan in plans]
        plans = [replace(plan, backend=ContractBackend(contract)) for plan in plans]
        both = run_audits(source.model, source.batches, [*plans, *usual], config.on_progress)
        audits, before = both[: len(plans)], both[len(plans) :]
    elif config.static:
        audits, before = [static_audit(source, plan) for plan in plans], []
    else:
        audits, before = run_audits(source.model, source.batches, plans, config.on_progress), []
    made: list[Audited] = []
    for audit, rules, plan in zip(audits, rule_sets, plans, strict=True):
        asked = config.prove or config.static or config.stress > 0
        table = prove(audit, source.batches, plan, config) if asked else None
        context = context_of(audit, form, config, table)
        if table is not None and not config.static and not contract.words:
            compare_with_run(context, source.batches)
        found = run_checks(context, ALL_CHECKS)
        hiding = (*hidden, *comments_in(() if source.names_files else context.sites))
        shown = suppressed(found, hiding)
        combined = None
        if (config.advise or config.diff) and not config.ranges and not config.static:
            shown, combined = advised(shown, source, plan, context, config, hiding)
        report = replace(_report(audit, context, shown, (source, rules, config)), combined=combined)
        if before:
            usual_context = context_of(before[len(made)], form, config.changed(contract=""))
            report = replace(report, changed=changed_verdicts(usual_context, context, report))
        if config.stress > 0 and not config.static:
            report = replace(report, stressed=stressed(source, audit, plan, context, config))
        made.append(Audited(report, audit, rules))
    return made


def _contract(audit: Audit, config: ScanConfig) -> str:
    native = audit.record.backend == "native" and not config.static
    return "the device's own kernels" if native else parse_contract(config.contract).text


def _report(
    audit: Audit,
    context: CheckContext,
    findings: tuple[Finding, ...],
    subject: tuple[ModelSource, RuleSet, ScanConfig],
) -> Report:
    source, rules, config = subject
    level: Literal["ranges", "scan", "static"] = "ranges" if config.ranges else "scan"
    level = "static" if config.static else level
    info = RunInfo(
        device=audit.record.device,
        backend="float32" if config.ranges else audit.record.backend,
        dtype=context.number_format.name,
        policy="fp32" if config.ranges else rules.name,
        batches=audit.record.batches,
        seed=config.seed,
        level=level,
        contract=_contract(audit, config),
        mode="train" if source.model.training else "eval",
    )
    model = ModelInfo(source.location, source.kind, source.sha256)
    return build_report(
        context, findings, audit.converted, model, info, config.fail_on, promoted=audit.promoted
    )
