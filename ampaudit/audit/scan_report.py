"""Builds the report of an audit from its sites, record and findings."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Literal

from ampaudit.audit.checks import Finding, Severity, run_checks
from ampaudit.audit.checks.coverage import gaps_of
from ampaudit.audit.checks.interface import PASSES_ON, CheckContext, finding_source, source_of
from ampaudit.audit.checks.outputs import accuracy_text
from ampaudit.audit.instruments import checks_for
from ampaudit.core import __version__
from ampaudit.core.formats import WHAT_IF_FORMATS, NumberFormat
from ampaudit.core.sites import SiteId
from ampaudit.core.text import finite_or_none
from ampaudit.findings.finding import FailOnGaps, Gap, GapKind, gate_on, verdict_on
from ampaudit.report.extrapolation import Proofs, Tail, VerdictChange
from ampaudit.report.model import (
    SCHEMA,
    Coverage,
    Environment,
    Forward,
    InputPath,
    ModelInfo,
    OutputAccuracy,
    ReadLine,
    Report,
    RunInfo,
    SiteReport,
    ToolInfo,
    WeightMemory,
    WhatIf,
)
from ampaudit.run.audit import Audit
from ampaudit.run.extreme_value import MIN_BATCHES, tail_risk
from ampaudit.run.measure import Observation
from ampaudit.run.record import ReadStats
from ampaudit.trace import Role, Site
from ampaudit.trace.path.reads import ReadKind
from ampaudit.trace.values import dtype_name

SiteVerdict = Literal["proved", "observed", "overflows", "poisoned", "not observed"]
_MAX_ANSWERS = 2  # distinct values that are listed for one line
THIS_TOOL = ToolInfo("ampaudit", __version__)

CONTRACT = (
    "matrix products, sums and norms add up in float32 in any order; a norm's variance is taken about the "
    "mean that it subtracts; overflow gives infinity; subnormals are kept"
)
_ON_PATH = "the code decides as on these inputs, and reads the same numbers"
_MAX_TAILS = 5  # sites whose tail risk is estimated
_COVERED = (
    GapKind.NOT_RUN,
    GapKind.OPAQUE,
    GapKind.UNCHECKED_TWIN,
    GapKind.OUTSIDE,
    GapKind.OTHER_CODE,
)  # gaps that belong to no op, or to an op whose results are measured


def build_report(
    context: CheckContext,
    findings: tuple[Finding, ...],
    audit: Audit,
    model: ModelInfo,
    run: RunInfo,
    fail_on: FailOnGaps,
) -> Report:
    """Return the report of one audit."""
    hidden = {(f.code, f.site) for f in findings if f.suppressed is not None}
    all_gaps = gaps_of(context)
    gaps = tuple(gap for gap in all_gaps if (gap.kind.code, gap.site) not in hidden)
    memory = audit.converted.weight_bytes
    return Report(
        schema=SCHEMA,
        tool=THIS_TOOL,
        model=model,
        run=run,
        verdict=verdict_on(findings, ranges=run.level == "ranges"),
        gate=gate_on(findings, gaps, fail_on),
        fail_on=fail_on,
        coverage=_coverage(context, all_gaps),
        findings=findings,
        sites=tuple(_site_report(context, site) for site in context.sites if site.dtype is not None),
        outputs=tuple(_output_accuracy(context, *output) for output in context.outputs),
        weights=WeightMemory(memory["master"], memory["working"]),
        notes=tuple(dict.fromkeys(note for traced in context.flow.traces for note in traced.notes)),
        promoted=audit.promoted,
        proofs=_proofs(context),
        tails=_tails(context),
        path=path_report(context),
        steps=context.steps,
        environment=this_environment(),
        gaps=gaps,
        timings={name: round(seconds, 4) for name, seconds in context.record.seconds.items()},
    )


def this_environment() -> Environment:
    """Return the versions of Python and torch."""
    return Environment(platform.python_version(), version("torch"))


def changed_verdicts(usual: CheckContext, here: CheckContext, report: Report) -> tuple[VerdictChange, ...]:
    """Return the sites whose gravest finding differs from that under the usual contract, in graph order."""
    before = _gravest(run_checks(usual, checks_for(usual.config)))
    after = _gravest(report.findings)
    sites = [s.id for s in here.sites if s.id in before or s.id in after]
    fine = "no finding"
    changes = (VerdictChange(s, before.get(s, fine), after.get(s, fine)) for s in sites)
    return tuple(change for change in changes if change.usual != change.here)


def _gravest(findings: Sequence[Finding]) -> dict[SiteId, str]:
    gravest: dict[SiteId, str] = {}
    for finding in findings:  # they are sorted by severity, the gravest first
        if finding.severity is not Severity.NOTE:
            gravest.setdefault(finding.site, f"{finding.severity} {finding.code}")
    return gravest


def _coverage(context: CheckContext, gaps: Sequence[Gap]) -> Coverage:
    floats = [site for site in context.sites if site.dtype is not None]
    measured = [s for s in floats if s.id in context.record.observations]
    return Coverage(
        sites=len(floats),
        audited=sum(s.id in context.record.observations or s.role in PASSES_ON for s in floats),
        measured=len(measured),
        proved=len(context.proved),
        integer_sites=len(context.sites) - len(floats),
        no_rule=sum(s.decision.rule is None and not s.role.inserted for s in floats),
        author_sites=sum(s.decision.reason == "author" for s in floats),
        casts=sum(s.role.inserted for s in floats),
        author_casts=sum(s.role is Role.CAST for s in floats),
        uncovered_ops=tuple(sorted({gap.op for gap in gaps if gap.kind not in _COVERED})),
    )


def _site_report(context: CheckContext, site: Site) -> SiteReport:
    stats = context.record.observations.get(site.id)
    what_if, forward = None, None
    bound = context.bounds.bounds.get(site.id) if context.bounds is not None else None
    verdict: SiteVerdict = "observed" if stats is not None or site.role in PASSES_ON else "not observed"
    if site.id in context.broken_sites:
        verdict = "overflows" if site.id in context.origins else "poisoned"
    elif site.id in context.proved:
        verdict = "proved"
    if stats is not None:
        forward = _forward(stats, context.number_format, context.record.names.get(stats.peak_batch))
        if context.config.ranges:
            what_if = {form.name: _what_if(stats, form) for form in WHAT_IF_FORMATS}
    return SiteReport(
        site=site.id,
        layer=site.layer,
        layer_type=site.layer_type,
        op=site.op,
        role=site.role.value,
        precision=dtype_name(site.dtype),
        shape=site.shape,
        rule=site.decision.rule,
        reason=site.decision.reason,
        why=site.decision.why,
        source=finding_source(site),
        verdict=verdict,
        by_design=site.id in context.by_design,
        forward=forward,
        bound=finite_or_none(bound.peak) if bound is not None else None,
        bound_inside=finite_or_none(bound.inside) if bound is not None else None,
        inside=stats.inside_peak if stats is not None and stats.inside_peak > 0 else None,
        what_if=what_if,
    )


def _tails(context: CheckContext) -> tuple[Tail, ...]:
    """Estimate the tail risk of the 16-bit sites nearest the limit, if there are enough batches."""
    if context.record.batches < MIN_BATCHES or context.record.origins or context.config.steps is not None:
        return ()
    shapes = [shape for shape, _ in context.flow.traced.signature]
    samples = shapes[0][0] if shapes and shapes[0] else 1
    sites = [s for s in context.low_precision_sites if s.role is not Role.WEIGHT_CAST]
    sites = [s for s in sites if s.id not in context.by_design]
    sites.sort(key=lambda s: -context.observed(s.id).ref_peak)
    limit = context.number_format.overflow_at
    peaks = {site.id: list(context.observed(site.id).batch_peaks.values()) for site in sites[:_MAX_TAILS]}
    risks = (tail_risk(site, values, limit, samples) for site, values in peaks.items())
    return tuple(risk for risk in risks if risk is not None)


def _proofs(context: CheckContext) -> Proofs | None:
    table = context.bounds
    if table is None:
        return None
    contract = f"{_ON_PATH}; {CONTRACT}" if context.record.path.paths else CONTRACT
    return Proofs(table.assumed, len(table.proved), len(table.bounds), table.uncovered, contract)


def _forward(stats: Observation, form: NumberFormat, batch: str | None) -> Forward:
    samples = stats.samples
    count = max(samples.sampled, 1)
    return Forward(
        peak=stats.finite_peak,
        headroom_bits=headroom_bits(form, stats.finite_peak),
        inf=int(stats.pos_inf + stats.neg_inf),
        nan=int(stats.nan),
        elements=stats.elements,
        sqnr_db=round_db(stats.sqnr_db),
        local_sqnr_db=round_db(stats.local_sqnr_db),
        local_elements=stats.local_elements,
        sampled=samples.sampled,
        min_nonzero=samples.min_nonzero,
        flushed=samples.flushed / count,
        subnormal=samples.subnormal / count,
        max_error=samples.max_error,
        max_relative_error=samples.max_relative,
        exponents=dict(sorted(samples.exponents.items())),
        batch=batch,
    )


def _what_if(stats: Observation, form: NumberFormat) -> WhatIf:
    samples = stats.samples
    nonzero = sum(samples.exponents.values())
    _, cut = math.frexp(form.flush_below)
    vanished = sum(n for exponent, n in samples.exponents.items() if exponent < cut - 1)
    return WhatIf(
        headroom_bits=headroom_bits(form, stats.ref_peak),
        overflows=stats.ref_peak >= form.overflow_at,
        vanish=vanished / nonzero if nonzero else 0.0,
    )


def _output_accuracy(
    context: CheckContext, name: str, site: SiteId | None, sqnr: float | None
) -> OutputAccuracy:
    comparison = context.record.outputs.get(name)
    if comparison is None:
        return OutputAccuracy(name, site, round_db(sqnr))
    broken = sqnr == -math.inf
    problem = accuracy_text(comparison, context.number_format.name) if broken else ""
    return OutputAccuracy(
        name,
        site,
        None if broken else round_db(sqnr),
        kind=comparison.kind,
        differing=comparison.differing,
        problem=problem,
        variation_db=round_db(comparison.variation_db),
        constant=comparison.constant if comparison.kind != "integer" else None,
        empty=not comparison.elements and not comparison.mismatch,
        repaired=bool(comparison.bad) and not problem,
        batch=context.record.names.get(comparison.batch),
    )


def headroom_bits(form: NumberFormat, peak: float) -> float | None:
    """Return a headroom as reports show it; ``None`` if all values are zero."""
    return round(form.headroom_bits(peak), 4) if peak > 0 else None


def round_db(value: float | None) -> float | None:
    """Round an accuracy in dB as reports show it."""
    return None if value is None else round(value, 3)


def path_report(context: CheckContext) -> InputPath | None:
    """Return the lines that decided the path; ``None`` if the graph is valid for all inputs."""
    record = context.record.path
    if not record.paths:
        return None
    lines = [
        ReadLine(
            name=stats.name,
            kind=stats.kind.value,
            layer=stats.layer,
            source=source_of(stats.source, stats.caller),
            reads=stats.reads,
            differing=stats.differing,
            batch=stats.batch,
            fp32=_answers(stats),
            low=stats.low,
        )
        for stats in record.reads.values()
    ]
    return InputPath(len(record.paths), tuple(lines))


def _answers(stats: ReadStats) -> str:
    """Return the FP32 value of the read that differs, or the most common values with their counts."""
    if stats.differing or len(stats.answers) == 1 or stats.kind is not ReadKind.CHOICE:
        return stats.fp32
    listed = ", ".join(f"{value} {count}x" for value, count in stats.answers.most_common(_MAX_ANSWERS))
    return f"{listed}, ..." if len(stats.answers) > _MAX_ANSWERS else listed
