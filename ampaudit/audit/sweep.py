"""``--sweep``: scans a model at several input sizes, and extrapolates the size at which it overflows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import TypeAlias

from ampaudit.audit.checks.interface import finding_about
from ampaudit.audit.checks.suppress import comments_of_files, option, with_later
from ampaudit.audit.config import ScanConfig
from ampaudit.core.assumptions import parse_sweep
from ampaudit.core.errors import AuditError, UsageError, first_line
from ampaudit.core.formats import low_precision_format
from ampaudit.core.sites import SiteId
from ampaudit.findings.finding import Finding, Severity, gate_on, verdict_on
from ampaudit.report.extrapolation import SizeGrowth, SizeResult, Sweep
from ampaudit.report.model import Report, SiteReport
from ampaudit.run.extreme_value import MIN_SIZES, crossing_of
from ampaudit.source import ModelSource

CODE = "AMP120"
_MAX_SITES = 10
Sized: TypeAlias = tuple[Report, frozenset[SiteId]]


def scan_sizes(
    source: ModelSource, config: ScanConfig, audit: Callable[[ModelSource], list[Sized]]
) -> list[Report]:
    """Audit a source at each size, and return each policy's worst report with the results of all sizes.

    The audit returns a report for each policy, and the sites that it keeps in float32 where they overflow.

    Raises:
        UsageError: Inputs of other sizes cannot be generated.
        AuditError: The model cannot be audited at any size.
    """
    axis, values = parse_sweep(config.sweep)
    if source.make_batches is None:
        hint = f"write def example_inputs({axis}={values[0]}): ..., or pass such a function as inputs"
        raise UsageError(f"--sweep: the inputs of {source.location} have no sizes to choose", hint=hint)
    reports: dict[int, list[Report]] = {}
    promoted: defaultdict[int, set[SiteId]] = defaultdict(set)  # by the number of the policy
    failures: dict[int, AuditError] = {}
    for value in values:
        try:
            audited = audit(replace(source, batches=source.make_batches({axis: value})))
        except UsageError:
            raise
        except AuditError as error:
            failures[value] = error
            continue
        reports[value] = [report for report, _ in audited]
        for index, (_, sites) in enumerate(audited):
            promoted[index] |= sites
    if not reports:
        raise failures[values[0]]
    problems = {value: first_line(error) for value, error in failures.items()}
    policies = len(next(iter(reports.values())))
    worst = [
        _worst({v: r[i] for v, r in reports.items()}, promoted[i], axis, problems, config)
        for i in range(policies)
    ]
    return [_with_warnings(report, config, comments=not source.names_files) for report in worst]


def _worst(
    reports: Mapping[int, Report],
    promoted: Set[SiteId],
    axis: str,
    problems: Mapping[int, str],
    config: ScanConfig,
) -> Report:
    def rank(value: int) -> tuple[int, int, float, int]:
        report = reports[value]
        least = report.least_headroom
        bits = math.inf if least is None or least.headroom_bits is None else least.headroom_bits
        return report.exit_code, report.count(Severity.ERROR), -bits, value

    worst = max(reports, key=rank)
    values = [_value(value, report) for value, report in reports.items()]
    values += [SizeResult(value, "not run", problem=problem) for value, problem in problems.items()]
    values.sort(key=lambda swept: swept.value)
    growth = sorted(_growth(reports, promoted, config), key=lambda result: result.crossing)
    result = Sweep(axis, tuple(values), worst, tuple(growth[:_MAX_SITES]))
    return replace(reports[worst], sweep=result)


def _with_warnings(report: Report, config: ScanConfig, *, comments: bool) -> Report:
    """Add a finding for each site that is expected to overflow beyond the sizes that were run."""
    sweep = report.sweep
    assert sweep is not None
    sites = {site.site: site for site in report.sites}
    ahead = (each for each in sweep.growth if each.extrapolated and not each.promoted)
    beyond = (each for each in ahead if each.site in sites)
    added = [_finding(growth, sites[growth.site], report, sweep) for growth in beyond]
    files = dict.fromkeys(line.file for growth in added if (line := growth.source) is not None)
    hiding = (*map(option, config.ignore), *(comments_of_files(files) if comments else ()))
    findings = with_later(report.findings, added, hiding)
    ordered = tuple(sorted(findings, key=lambda finding: -finding.severity.rank))
    verdict = verdict_on(ordered, ranges=report.run.level == "ranges")
    gate = gate_on(ordered, report.gaps, config.fail_on)
    return replace(report, findings=ordered, verdict=verdict, gate=gate)


def _finding(growth: SizeGrowth, site: SiteReport, report: Report, sweep: Sweep) -> Finding:
    largest = sweep.values[-1].value
    cause = (
        f"its peak grows with {sweep.axis}: extrapolated from sizes up to {largest:,}, it passes the "
        f"largest value of {report.run.dtype} at about {growth.crossing:,}"
    )
    advice = f"run at that size: --sweep {sweep.axis}={largest},{growth.crossing}"
    finding = finding_about(CODE, growth.site, site.layer, cause, advice, confidence="rule")
    return replace(finding, phase="forward", op=site.op, source=site.source)


def _value(value: int, report: Report) -> SizeResult:
    least, worst = report.least_headroom, report.worst_output
    errors = [finding for finding in report.active if finding.severity is Severity.ERROR]
    return SizeResult(
        value,
        "fail" if report.verdict == "fail" else "pass",
        errors=len(errors),
        warnings=report.count(Severity.WARNING),
        breaks=tuple(dict.fromkeys(finding.site for finding in errors)),
        headroom_bits=None if least is None else least.headroom_bits,
        nearest=None if least is None else least.site,
        output="constant" if worst is not None and worst.constant is not None else report.accuracy,
    )


def _growth(reports: Mapping[int, Report], promoted: Set[SiteId], config: ScanConfig) -> Iterator[SizeGrowth]:
    """Yield the fits of the 16-bit sites that overflow within or beyond the sizes that were run."""
    limit = low_precision_format(config.dtype).overflow_at
    rows = {value: _largest(report) for value, report in reports.items()}
    for place in dict.fromkeys(place for row in rows.values() for place in row):
        sizes = [value for value, row in rows.items() if place in row]
        peaks = [rows[value][place][0] for value in sizes]
        fit = crossing_of(sizes, peaks, limit) if len(sizes) >= MIN_SIZES else None
        if fit is None:
            continue
        over = [value for value, peak in zip(sizes, peaks, strict=True) if peak >= limit]
        size, low, high = _clamp_to_runs(sizes, over, fit.size, fit.low, fit.high)
        yield SizeGrowth(
            rows[sizes[-1]][place][1],
            fit.form,
            None if fit.exponent is None else round(fit.exponent, 4),
            tuple(row[place][0] if place in row else None for row in rows.values()),
            r_squared=round(fit.r_squared, 6),
            residual_bits=round(fit.residual_bits, 4),
            crossing=math.ceil(round(size, 3)),
            low=math.floor(round(low, 3)),
            high=None if math.isinf(high) else math.ceil(round(high, 3)),
            extrapolated=not over,
            promoted=rows[sizes[-1]][place][1] in promoted,
        )


def _largest(report: Report) -> dict[Hashable, tuple[float, SiteId]]:
    """Return the largest FP32 peak of the 16-bit sites of each line of code, with its site.

    Sites are grouped by line because a line that runs more often on longer inputs has more sites, so that the
    same site id refers to different ops at different sizes.
    """
    peaks: dict[Hashable, tuple[float, SiteId]] = {}
    for site in report.low_precision_sites:
        if site.forward is not None and site.role != "weight-cast" and not site.by_design:
            line = site.site if site.source is None else (site.source.file, site.source.line)
            place = site.layer, site.op, line
            peaks[place] = max(peaks.get(place, (0.0, site.site)), (site.forward.peak, site.site))
    return peaks


def _clamp_to_runs(sizes: Sequence[int], over: Sequence[int], *estimates: float) -> tuple[float, ...]:
    """Clamp estimated sizes between the largest size without an overflow and the first with one."""
    fine = max((size for size in sizes if not over or size < over[0]), default=0)
    return tuple(max(min(size, over[0] if over else size), fine) for size in estimates)
