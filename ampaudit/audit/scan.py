"""``ampaudit scan``: finds the layers that break in 16 bits, on real input."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import psutil
import torch

from ampaudit.audit.checks import run_checks
from ampaudit.audit.checks.interface import context_of
from ampaudit.audit.checks.suppress import comments_in, option, suppressed
from ampaudit.audit.config import Rules, ScanConfig, excluded_by, policies_of, rules_of
from ampaudit.audit.inputs import Inputs, ModelLike, SizedInputs, as_source, open_against
from ampaudit.audit.instruments import checks_for
from ampaudit.audit.scan_report import build_report, changed_verdicts
from ampaudit.core.config import with_options
from ampaudit.core.errors import UsageError
from ampaudit.core.formats import low_precision_format
from ampaudit.core.instruments import measuring
from ampaudit.core.session import DEFAULT_SESSION, Progress, Session
from ampaudit.core.sites import SiteId
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.text import parse_size
from ampaudit.policy import Measurement, RuleSet, load_policy
from ampaudit.policy.schema import AS_IS
from ampaudit.report.model import Comparison, ModelInfo, Report, RunInfo
from ampaudit.run.audit import Audit, promoted_sites, run_audits
from ampaudit.run.backends import ContractBackend, parse_contract
from ampaudit.run.config import RunConfig, Steps
from ampaudit.run.device import environment_of, pick_device
from ampaudit.run.share import ALONE, Share
from ampaudit.source import ModelSource
from ampaudit.source.dequantize import with_plain_weights
from ampaudit.source.next_inputs import stepping
from ampaudit.source.twins import using_twins
from ampaudit.trace.isolation import isolated, preserved

# shares of the free memory; the rest is for other processes and for the run itself
_HOST_SHARE = 0.5
_DEVICE_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Audited:
    """A report with its audit and its policy for the run's device."""

    report: Report
    audit: Audit
    rules: RuleSet

    def promoted_at(self, peak: float) -> frozenset[SiteId]:
        """Return the 16-bit sites that the policy keeps in float32 where their output has such a peak."""
        measured = dict.fromkeys((site.id for site in self.audit.sites), Measurement(output_peak=peak))
        return frozenset(promoted_sites(self.rules, self.audit.sites, measured))


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
@isolated()
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
        session: Context of the call: functions that receive progress and outputs, a backend ...
        **options: Fields of ``ScanConfig``, which override those of ``config``.

    Returns:
        The report with findings, sites, outputs and a verdict; for several policies, a comparison of reports.

    Raises:
        AuditError: See ``ampaudit.core.errors``.
    """
    config = ScanConfig.merged(config, options)
    config.check()
    policies = policies_of(config.policy if policy is None else policy)
    loading = source or SourceConfig(seed=config.seed, train=config.trains)
    if config.sweep and isinstance(loading, SourceConfig):
        loading = loading.changed(input_sizes=config.first_sizes)
    opened = as_source(model, inputs, batches, loading)
    if config.against is not None:
        opened = open_against(opened, config.against, loading)
    explicit = config.model_fields_set | ({"policy"} if policy is not None else set())
    policies, config = as_converted(opened, policies, config, explicit)
    reports = scan_policies(opened, policies, config, session)
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

    def audited(sized: ModelSource) -> list[Audited]:
        return audit_policies(sized, policies, config, session)

    with using_twins(config.twins):
        if not config.sweep:
            return [each.report for each in audited(source)]
        from ampaudit.audit.sweep import scan_sizes

        limit = low_precision_format(config.dtype).overflow_at
        return scan_sizes(
            source, config, lambda sized: [(each.report, each.promoted_at(limit)) for each in audited(sized)]
        )


@preserved()
def audit_policies(
    source: ModelSource, policies: Sequence[Rules], config: ScanConfig, session: Session = DEFAULT_SESSION
) -> list[Audited]:
    """Audit a loaded source under several policies, and return the audits with their reports."""
    config = config.changed(prove=config.prove or bool(config.assume))
    config.check()
    device = pick_device(config.device, audits=True)
    rule_sets = [rules_of(policy).for_environment(environment_of(device)) for policy in policies]
    source, run_configs = _configured(with_plain_weights(source), rule_sets, device, config, session)
    audits, usual = _run(source, run_configs, config, session)
    results = []
    for audit, before, rules, run_config in zip(audits, usual, rule_sets, run_configs, strict=True):
        report = _report(audit, before, rules, run_config, source, config, session.on_progress)
        results.append(Audited(report, audit, rules))
    return results


def _configured(
    source: ModelSource,
    rule_sets: Sequence[RuleSet],
    device: torch.device,
    config: ScanConfig,
    session: Session,
) -> tuple[ModelSource, list[RunConfig]]:
    """Return the source to run, with the inputs of its steps or its loss, and each policy's configuration."""
    backend = session.backend
    if backend is not None and not isinstance(getattr(backend, "name", None), str):
        raise UsageError(
            f"backend is of type {type(backend).__name__}", hint="pass a Backend, or leave it out"
        )
    common = RunConfig(
        rules=None,  # differ by policy
        author_rules=load_policy("torch-cuda"),
        number_format=low_precision_format(config.dtype),
        device=device,
        seed=config.seed,
        backend=backend,
        keep_graphs=config.prove or config.stress > 0,
        keep_outputs=session.keep_outputs,
        release=source.release,
        min_sqnr=config.min_sqnr,
    )
    if config.steps is not None:
        declared = source.next_inputs if config.next_inputs is None else config.next_inputs
        batches, function, fed_back = stepping(source.model, source.batches, declared, config.steps)
        source = replace(source, batches=batches)
        common = replace(common, steps=Steps(config.steps, function, fed_back))
    for instrument in config.requested:
        source = measuring(instrument).prepared(source, config)
    common = replace(common, memory=_memory(source, device, config, session.share or ALONE))
    contract = parse_contract(config.contract)
    if contract.words:
        common = replace(common, backend=ContractBackend(contract))
    run_configs = []
    for rules in rule_sets:
        run_config = common if config.ranges else replace(common, rules=rules)
        for instrument in config.requested:
            run_config = measuring(instrument).configured(run_config, source, config)
        run_configs.append(run_config)
    return source, run_configs


def _run(
    source: ModelSource, run_configs: list[RunConfig], config: ScanConfig, session: Session
) -> tuple[list[Audit], list[Audit | None]]:
    """Run every configuration; with ``--contract``, also each on the usual backend, to compare."""
    if config.static:
        from ampaudit.audit.proofs import static_audit

        return [static_audit(source, each) for each in run_configs], [None] * len(run_configs)
    without_contract = []
    if parse_contract(config.contract).words:
        changes: dict[str, Any] = {"backend": session.backend, "recorders": (), "min_sqnr": None}
        without_contract = [replace(each, **changes) for each in run_configs]
    share, count = session.share or ALONE, len(run_configs)
    audits = run_audits(
        source.model, source.batches, [*run_configs, *without_contract], session.on_progress, share
    )
    return audits[:count], [*audits[count:]] if without_contract else [None] * count


def _report(
    audit: Audit,
    usual: Audit | None,
    rules: RuleSet,
    run_config: RunConfig,
    source: ModelSource,
    config: ScanConfig,
    on_progress: Progress,
) -> Report:
    """Return the report of an audit; ``usual`` is the audit without an execution contract."""
    form = run_config.number_format
    table = None
    if config.prove or config.static or config.stress > 0:
        from ampaudit.audit.proofs import compare_with_run, prove, search_overflows

        table = prove(audit, source.batches, run_config, config)
    context = context_of(audit, form, config, table)
    outside = compare_with_run(context, source.batches) if table is not None and not config.static else ()
    findings = run_checks(context, checks_for(config))
    hiding = (*map(option, config.ignore), *comments_in(() if source.names_files else context.sites))
    findings, combined = suppressed(findings, hiding), None
    advising = (config.advise or config.diff) and not config.ranges and not config.static
    if advising:
        from ampaudit.audit.advise import add_advice

        findings, combined = add_advice(findings, source, run_config, context, hiding, on_progress)
    level: Literal["ranges", "scan", "static"] = "ranges" if config.ranges else "scan"
    level = "static" if config.static else level
    native = audit.record.backend == "native" and not config.static
    run = RunInfo(
        device=audit.record.device,
        backend="float32" if config.ranges else audit.record.backend,
        dtype=form.name,
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
    report = build_report(context, findings, audit, model, run, config.fail_on)
    if usual is not None:
        before = context_of(usual, form, config.changed(contract=""))
        report = replace(report, changed=changed_verdicts(before, context, report))
    stress = config.stress > 0 and not config.static
    searched = search_overflows(source, audit, run_config, context, on_progress) if stress else ()
    idle = ("--stress searched nothing: each 16-bit site is proved, broken or constant",)
    for instrument in config.requested:
        report = measuring(instrument).reported(instrument, report, source, audit, context)
    return replace(
        report,
        notes=(*source.notes, *report.notes, *outside, *(idle if stress and not searched else ())),
        combined=combined,
        advised=advising,
        stressed=searched,
    )


def _memory(source: ModelSource, device: torch.device, config: ScanConfig, share: Share) -> int | None:
    """Return the memory limit of runs by segment; ``None`` to run whole batches.

    Several batches of streamed weights, and pipelines, have the usual limit.

    Raises:
        UsageError: A pipeline is combined with an option that needs the whole model.
    """
    whole = next((option for option in excluded_by("memory") if getattr(config, option)), "")
    if share.stages() > 1 and whole:
        raise UsageError(
            f"--pipeline cannot be combined with --{whole}, which needs the whole model",
            hint=f"leave out --{whole}",
        )
    if config.memory:
        return parse_size(config.memory)
    streams = source.release is not None and len(source.batches) > 1
    return usual_memory(device) if not whole and (streams or share.stages() > 1) else None


def usual_memory(device: torch.device) -> int:
    """Return the default memory limit of a run in bytes: a share of the free memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _DEVICE_SHARE)
    return int(psutil.virtual_memory().available * _HOST_SHARE)
