"""``ampaudit scan``: finds the layers that break in 16 bits, on real input."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import psutil
import torch

from ampaudit.audit.advise import advised
from ampaudit.audit.checks import ALL_CHECKS, Finding, run_checks
from ampaudit.audit.checks.interface import CheckContext, context_of
from ampaudit.audit.checks.model_code import against_report
from ampaudit.audit.checks.suppress import comments_in, option, suppressed
from ampaudit.audit.config import Rules, ScanConfig, excluded_by, policies_of, rules_of
from ampaudit.audit.inputs import Inputs, ModelLike, SizedInputs, as_source, beside
from ampaudit.audit.instruments import checks_of, requested, sections_of, with_recorders
from ampaudit.audit.proofs import compare_with_run, prove, static_audit, stressed
from ampaudit.audit.scan_report import build_report, changed_verdicts
from ampaudit.audit.sweep import first_sizes, swept
from ampaudit.core.config import with_options
from ampaudit.core.errors import InputError, UsageError
from ampaudit.core.formats import low_precision_format
from ampaudit.core.session import DEFAULT_SESSION, Session
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.text import parse_size
from ampaudit.policy import RuleSet, load_policy
from ampaudit.policy.load import StartingScale, starting_scale
from ampaudit.policy.schema import AS_IS
from ampaudit.report.model import Comparison, ModelInfo, Report, RunInfo
from ampaudit.run.against.reference import ReferenceModel
from ampaudit.run.audit import Audit, run_audits
from ampaudit.run.backends import ContractBackend, parse_contract
from ampaudit.run.backward.gradients import GradientAudit
from ampaudit.run.config import RunConfig, Steps
from ampaudit.run.device import environment_of, pick_device
from ampaudit.run.share import ALONE, Share
from ampaudit.source import Batch, ModelSource
from ampaudit.source.next_inputs import stepping
from ampaudit.source.stored_weights import with_plain_weights
from ampaudit.source.twins import using_twins
from ampaudit.trace.isolation import preserved
from ampaudit.trace.loss import WithLoss, item_apart

__all__ = ["Audited", "as_converted", "audit_policies", "scan", "scan_policies"]

# shares of the free memory; the rest is for other processes and for the run itself
_HOST_SHARE = 0.5
_DEVICE_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Audited:
    """A report with its audit and its policy for the run's device."""

    report: Report
    audit: Audit
    rules: RuleSet


@overload
def scan(
    model: ModelLike,
    inputs: Inputs | SizedInputs | None = None,
    *,
    policy: Rules = ...,
    batches: Iterable[Inputs] | None = None,
    source: SourceConfig | None = None,
    config: ScanConfig | None = None,
    session: Session = ...,
    **options: Any,
) -> Report: ...


@overload
def scan(
    model: ModelLike,
    inputs: Inputs | SizedInputs | None = None,
    *,
    policy: list[Rules] | tuple[Rules, ...],
    batches: Iterable[Inputs] | None = None,
    source: SourceConfig | None = None,
    config: ScanConfig | None = None,
    session: Session = ...,
    **options: Any,
) -> Comparison: ...


@with_options(ScanConfig)
def scan(
    model: ModelLike,
    inputs: Inputs | SizedInputs | None = None,
    *,
    policy: Rules | Sequence[Rules] | None = None,
    batches: Iterable[Inputs] | None = None,
    source: SourceConfig | None = None,
    config: ScanConfig | None = None,
    session: Session = DEFAULT_SESSION,
    **options: Any,
) -> Report | Comparison:
    """Run a model in FP32 and in 16 bits side by side, and name what breaks.

    Args:
        model: Model in the mode to audit (``train()`` or ``eval()``), which is not changed; or its location:
            a path, or ``package.module:factory``.
        inputs: One batch: a tensor, a tuple of positional inputs, or a dict of keyword inputs; for ``sweep``,
            a function that makes a batch of a given size.
        policy: Name of a policy, path of a rule file, or a ``RuleSet``; a list compares several.
        batches: Several batches instead of one.
        source: Options to load a model from its location: weights, inputs, number of batches, ``trust`` ...
        config: Options as one record.
        session: What the call works with: functions that receive progress and outputs, a backend ...
        **options: Fields of ``ScanConfig``, which override those of ``config``.

    Returns:
        The report with findings, sites, outputs and a verdict; for several policies, a comparison of reports.

    Raises:
        AuditError: See ``ampaudit.core.errors``.
    """
    chosen = ScanConfig.given(config, options)
    chosen.check()
    policies = policies_of(chosen.policy if policy is None else policy)
    loading = source or SourceConfig(seed=chosen.seed, train=chosen.backward)
    if chosen.sweep and isinstance(loading, SourceConfig):
        loading = loading.changed(input_sizes=first_sizes(chosen))
    opened = as_source(model, inputs, batches, loading)
    if chosen.against is not None:
        opened = beside(
            opened, chosen.against, loading if isinstance(loading, SourceConfig) else SourceConfig()
        )
    given = {*options, *(config.model_fields_set if config is not None else ())}
    policies, chosen = as_converted(opened, policies, chosen, given if policy is None else {*given, "policy"})
    reports = scan_policies(opened, policies, chosen, session)
    several = len(policies) > 1 or isinstance(policy, list | tuple)
    return Comparison(tuple(reports)) if several else reports[0]


def as_converted(
    source: ModelSource, policies: list[RuleSet], config: ScanConfig, explicit: Collection[str]
) -> tuple[list[RuleSet], ScanConfig]:
    """Set the policy and dtype for a model whose program contains its casts, unless options set them."""
    if source.kind == "converted" or source.dtype is not None or source.reference is not None:
        policies = policies if "policy" in explicit else [load_policy(AS_IS)]
        stored = {tensor.dtype for tensor in source.model.state_dict().values()}
        low = "bfloat16" if {torch.bfloat16, torch.float16} & stored == {torch.bfloat16} else config.dtype
        dtype = config.dtype if "dtype" in explicit else source.dtype or low
        config = config.changed(dtype=dtype)
    return policies, config


def scan_policies(
    source: ModelSource, policies: Sequence[Rules], config: ScanConfig, session: Session = DEFAULT_SESSION
) -> list[Report]:
    """Audit a loaded source under several policies, with one run of the FP32 reference for all of them."""

    def reports_on(sized: ModelSource) -> list[Report]:
        return [each.report for each in audit_policies(sized, policies, config, session)]

    with using_twins(config.twins):
        return swept(source, config, reports_on) if config.sweep else reports_on(source)


@preserved()
def audit_policies(
    source: ModelSource, policies: Sequence[Rules], config: ScanConfig, session: Session = DEFAULT_SESSION
) -> list[Audited]:
    """Audit a loaded source under several policies, and return the audits with their reports."""
    backend, share = session.backend, session.share or ALONE
    if backend is not None and not isinstance(getattr(backend, "name", None), str):
        raise UsageError(
            f"backend is of type {type(backend).__name__}", hint="pass a Backend, or leave it out"
        )
    config = config.changed(prove=config.prove or bool(config.assume))
    config.check()
    source = with_plain_weights(source)
    form, device = low_precision_format(config.dtype), pick_device(config.device, audits=True)
    ignored, instruments = tuple(map(option, config.ignore)), requested(config)
    rule_sets = [rules_of(policy).for_environment(environment_of(device)) for policy in policies]
    author = load_policy("torch-cuda")
    subjects = [None if config.ranges else rules for rules in rule_sets]
    plans = [
        RunConfig(
            rules,
            author,
            form,
            device,
            config.seed,
            backend,
            keep_graphs=config.prove or config.stress > 0,
            keep_outputs=session.keep_outputs,
            release=source.release,
            min_sqnr=config.min_sqnr,
        )
        for rules in subjects
    ]
    if source.reference is not None:
        other = source.reference
        plans = [
            replace(plan, against=ReferenceModel(other.model, other.batches, plan, source.places))
            for plan in plans
        ]
    if config.steps is not None:
        declared = source.next_inputs if config.next_inputs is None else config.next_inputs
        batches, function, fed_back = stepping(source.model, source.batches, declared, config.steps)
        source = replace(source, batches=batches)
        plans = [replace(plan, steps=Steps(config.steps, function, fed_back)) for plan in plans]
    if config.backward:
        source, plans = differentiated(source, plans, config)
    plans = by_segment(plans, source, config, share)
    plans = [with_recorders(plan, source, config) for plan in plans]
    contract = parse_contract(config.contract)
    if contract.words and not (config.static or config.ranges):
        usual = [replace(plan, min_sqnr=None) for plan in plans]
        plans = [replace(plan, backend=ContractBackend(contract)) for plan in plans]
        both = run_audits(source.model, source.batches, [*plans, *usual], session.on_progress, share)
        audits, usual_audits = both[: len(plans)], both[len(plans) :]
    elif config.static:
        audits, usual_audits = [static_audit(source, plan) for plan in plans], []
    else:
        audits, usual_audits = run_audits(source.model, source.batches, plans, session.on_progress, share), []
    results: list[Audited] = []
    for audit, rules, plan in zip(audits, rule_sets, plans, strict=True):
        proving = config.prove or config.static or config.stress > 0
        table = prove(audit, source.batches, plan, config) if proving else None
        context = context_of(audit, form, config, table)
        if table is not None and not config.static and not contract.words:
            compare_with_run(context, source.batches)
        findings = run_checks(context, (*ALL_CHECKS, *checks_of(instruments)))
        hiding = (*ignored, *comments_in(() if source.names_files else context.sites))
        findings = suppressed(findings, hiding)
        combined = None
        advising = (config.advise or config.diff) and not config.ranges and not config.static
        if advising:
            findings, combined = advised(findings, source, plan, context, config, hiding, session.on_progress)
        report = _report(audit, context, findings, (source, rules, config))
        sections = sections_of(instruments, audit, form)
        report = replace(report, combined=combined, advised=advising, sections=sections)
        if usual_audits:
            usual_context = context_of(usual_audits[len(results)], form, config.changed(contract=""))
            report = replace(report, changed=changed_verdicts(usual_context, context, report))
        if config.stress > 0 and not config.static:
            report = replace(
                report, stressed=stressed(source, audit, plan, context, config, session.on_progress)
            )
        results.append(Audited(report, audit, rules))
    return results


def _report(
    audit: Audit,
    context: CheckContext,
    findings: tuple[Finding, ...],
    subject: tuple[ModelSource, RuleSet, ScanConfig],
) -> Report:
    source, rules, config = subject
    level: Literal["ranges", "scan", "static"] = "ranges" if config.ranges else "scan"
    level = "static" if config.static else level
    native = audit.record.backend == "native" and not config.static
    info = RunInfo(
        device=audit.record.device,
        backend="float32" if config.ranges else audit.record.backend,
        dtype=context.number_format.name,
        policy="fp32" if config.ranges else rules.name,
        batches=audit.record.batches // (config.steps or 1),
        steps=config.steps,
        seed=config.seed,
        level=level,
        contract="the device's own kernels" if native else parse_contract(config.contract).text,
        mode="train" if source.model.training else "eval",
        inputs=source.inputs,
    )
    model = ModelInfo(source.location, source.kind, source.sha256)
    report = build_report(
        context, findings, audit.converted, model, info, config.fail_on, promoted=audit.promoted
    )
    reference = source.reference
    against = None if reference is None else against_report(context, reference.location)
    return replace(report, notes=(*source.notes, *report.notes), against=against)


def by_segment(
    plans: Sequence[RunConfig], source: ModelSource, config: ScanConfig, share: Share
) -> list[RunConfig]:
    """Set the memory limit of runs by segment, if it is requested or several batches stream weights.

    Raises:
        UsageError: A pipeline is combined with an option that needs the whole model.
    """
    memory = parse_size(config.memory) if config.memory else None
    whole = next((option for option in excluded_by("memory") if getattr(config, option)), "")
    if share.route.stages() > 1 and whole:
        raise UsageError(
            f"--pipeline cannot be combined with --{whole}, which needs the whole model",
            hint=f"leave out --{whole}",
        )
    streams = source.release is not None and len(source.batches) > 1
    if memory is None and not whole and (streams or share.route.stages() > 1):
        memory = usual_memory(plans[0].device)
    return [replace(plan, memory=memory) for plan in plans]


def usual_memory(device: torch.device) -> int:
    """Return the default memory limit of a run in bytes: a share of the free memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _DEVICE_SHARE)
    return int(psutil.virtual_memory().available * _HOST_SHARE)


def differentiated(
    source: ModelSource, plans: Sequence[RunConfig], settings: ScanConfig
) -> tuple[ModelSource, list[RunConfig]]:
    """Add the loss to the model, and a backward pass to the configurations of its runs.

    Raises:
        UsageError: An option supports the forward pass only.
        InputError: No parameter requires a gradient.
    """
    _refuse_forward_only(settings, source)
    if not any(parameter.requires_grad for parameter in source.model.parameters()):
        raise InputError(
            "no parameter of the model requires a gradient",
            hint="call requires_grad_() on the parameters to train",
        )
    model = WithLoss(source.model, settings.loss or source.loss)
    batches = tuple(
        Batch((batch.args, batch.kwargs, item_apart(batch.args, batch.kwargs, batch.whole)), name=batch.name)
        for batch in source.batches
    )
    return replace(source, model=model, batches=batches), [_with_backward(plan, settings) for plan in plans]


def _with_backward(plan: RunConfig, settings: ScanConfig) -> RunConfig:
    assert plan.rules is not None, "--ranges has no backward pass"
    scale = starting_scale(plan.rules.file.loss_scale, plan.number_format)
    if settings.loss_scale is not None:
        scale = StartingScale(settings.loss_scale, False, "as given")
    return replace(plan, recorders=(GradientAudit,), functional=True, loss_scale=scale)


def _refuse_forward_only(settings: ScanConfig, source: ModelSource) -> None:
    if source.release is not None:
        raise UsageError("--backward cannot be combined with --stream", hint="leave out --stream")
    if source.kind in ("pt2", "converted"):
        raise UsageError(
            f"--backward: {source.location} is an exported program, which has no loss",
            hint="scan the Python model",
        )
