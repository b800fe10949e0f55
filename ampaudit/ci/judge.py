"""Judges a report by budgets and a baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ampaudit.core.errors import UsageError, did_you_mean
from ampaudit.core.untrusted import describe
from ampaudit.findings.finding import Finding, Gap, Severity, threshold
from ampaudit.findings.pages import all_pages
from ampaudit.report.check import Breach, Budgets, KnownFinding, KnownTarget, Measurements
from ampaudit.report.model import Report

# changes up to these are rounding: another order of summation, another version of a kernel
_BITS, _DB, _SHARE, _ROUNDING = 0.05, 0.5, 1e-9, 1e-12
_GROWTH = 10 ** (_DB / 20)  # of a drop of the metric
# healthy values may vary more: a site may lose one bit or half of its headroom, an output double its error
_FALL_BITS, _FALL_DB = 1.0, 6.0
_BROKEN = "holds inf or NaN, or nothing like FP32"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of comparing a report with budgets."""

    breaches: tuple[Breach, ...]  # that count; with a baseline, those that are new or worse
    known: tuple[Breach, ...] = ()  # that the baseline accepts
    gone: tuple[KnownFinding, ...] = ()  # findings of the baseline that no longer occur


def check_codes(allowed: str | Iterable[str]) -> tuple[str, ...]:
    """Check that codes to allow exist, and return them as a tuple.

    Raises:
        UsageError: A code is unknown.
    """
    known = list(all_pages())
    if not isinstance(allowed, Iterable):
        raise UsageError(f"allow is of type {type(allowed).__name__}", hint="pass a list of codes")
    codes = (allowed,) if isinstance(allowed, str) else tuple(allowed)
    for code in codes:
        if code not in known:
            raise UsageError(
                f"--allow {describe(code)}: no such check",
                hint=f"{did_you_mean(str(code), known)}'ampaudit explain' lists all codes",
            )
    return codes


def measured_in(report: Report) -> Measurements:
    """Extract from a report the quantities that budgets limit."""
    least = report.least_headroom
    broken = report.broken_outputs
    accuracies = [o.sqnr_db for o in report.outputs if o.sqnr_db is not None and o not in broken]
    computing = [site for site in report.sites if site.role == "compute"]
    wide = sum(site.precision == "float32" for site in computing)
    return Measurements(
        headroom_bits=least.headroom_bits if least else None,
        headroom_site=least.site if least else None,
        sqnr_db=min(accuracies, default=None),
        broken=tuple(output.name for output in broken),
        fp32_share=wide / len(computing) if computing else 0.0,
    )


def judge(
    report: Report, measurements: Measurements, budgets: Budgets, baseline: KnownTarget | None = None
) -> Judgement:
    """Compare a report and its measurements with budgets, and with a baseline if there is one."""
    counted = list(_counted_findings(report, budgets))
    if baseline is None:
        return Judgement(
            (*(breach for breach, _ in counted), *_exceeded_budgets(measurements, budgets, None))
        )
    accepted = {finding.key: finding for finding in baseline.findings}
    breaches: list[Breach] = []
    known: list[Breach] = []
    for breach, finding in counted:
        before = accepted.get(finding.key)
        worse = _worse(finding, before) if before is not None else ""
        if before is None:
            breaches.append(breach)
        elif worse:
            breaches.append(replace(breach, what=f"{worse}; {breach.what}"))
        else:
            known.append(breach)
    exceeded = list(_exceeded_budgets(measurements, budgets, baseline.measured))
    still = (breach for breach in _exceeded_budgets(measurements, budgets, None) if breach not in exceeded)
    occurring = {(f.code, f.site) for f in report.findings} | {(g.kind.code, g.op) for g in report.gaps}
    gone = tuple(finding for key, finding in accepted.items() if key not in occurring)
    counting = (*breaches, *exceeded)
    places = {breach.where for breach in counting}
    falls = (fall for fall in _regressions(report, measurements, baseline) if fall.where not in places)
    return Judgement((*counting, *falls), (*known, *still), gone)


def known_target(
    target: str,
    report: Report,
    measurements: Measurements,
    budgets: Budgets,
    before: KnownTarget | None = None,
) -> KnownTarget:
    """Return a target's entry for a baseline that accepts all findings that count.

    A finding that ``before`` accepts stays accepted if it still occurs, even if it does not count.
    """
    counted = {f.key: f for f in KnownFinding.of_each_site(f for _, f in _counted_findings(report, budgets))}
    everything = (*map(_known_finding, report.findings), *map(_known_gap, report.gaps))
    occurring = {finding.key: finding for finding in KnownFinding.of_each_site(everything)}
    for finding in before.findings if before is not None else ():
        if finding.key in occurring:
            severities = finding.severity, occurring[finding.key].severity
            least = min(severities, key=lambda severity: severity.rank)
            counted.setdefault(finding.key, replace(finding, severity=least))
    findings = tuple(counted[key] for key in sorted(counted))
    headroom = dict(sorted(_healthy_headroom(report)))
    return KnownTarget(target, report.run.policy, report.run.dtype, findings, headroom, measurements)


def _healthy_headroom(report: Report) -> Iterator[tuple[str, float]]:
    for site in report.low_by_headroom:
        if site.healthy and site.headroom_bits is not None:
            yield site.site, round(site.headroom_bits, 2)


def _counted_findings(report: Report, budgets: Budgets) -> Iterator[tuple[Breach, KnownFinding]]:
    least = threshold(budgets.fail_on)
    for finding in report.findings:
        if (
            finding.suppressed is None
            and finding.code not in budgets.allow
            and finding.severity.rank >= least
        ):
            breach = Breach(finding.code, finding.site, finding.cause, finding.severity, finding.source)
            yield breach, _known_finding(finding)
    for gap in report.gaps if budgets.fail_on == "gap" else ():
        if gap.kind.code not in budgets.allow:
            yield Breach(gap.kind.code, gap.site, gap.in_words), _known_gap(gap)


def _known_finding(finding: Finding) -> KnownFinding:
    numbers = finding.evidence.headroom_bits, finding.evidence.sqnr_db
    return KnownFinding(finding.code, finding.site, finding.severity, *numbers)


def _known_gap(gap: Gap) -> KnownFinding:
    return KnownFinding(gap.kind.code, gap.op, Severity.ERROR)


def _worse(now: KnownFinding, before: KnownFinding) -> str:
    """Describe how a finding is worse than in the baseline, beyond rounding; empty if it is not."""
    if now.severity.rank > before.severity.rank:
        return f"worse than in the baseline: {now.severity}, {before.severity} before"
    numbers = (
        (now.headroom_bits, before.headroom_bits, _BITS, ".2f", "bits of headroom"),
        (now.sqnr_db, before.sqnr_db, _DB, ".1f", "dB"),
    )
    for value, old, slack, form, unit in numbers:
        if value is not None and old is not None and old - value > slack:
            return f"worse than in the baseline: {value:{form}} {unit}, {old:{form}} before"
    return ""


def _regressions(report: Report, measurements: Measurements, baseline: KnownTarget) -> Iterator[Breach]:
    """Yield breaches for healthy sites that lost much headroom, and for outputs that lost their accuracy."""
    for site, bits in _healthy_headroom(report):
        before = baseline.headroom.get(site)
        if before is not None and before - bits > max(_FALL_BITS, before / 2):
            yield Breach("baseline", site, f"headroom {bits:.1f} bits, {before:.1f} in the baseline")
    then = baseline.measured
    exact = math.inf if then.accuracy == "exact" else None
    before = then.sqnr_db if then.sqnr_db is not None else exact
    if before is not None and measurements.sqnr_db is not None and before - measurements.sqnr_db > _FALL_DB:
        yield Breach("baseline", "outputs", f"{measurements.sqnr_db:.1f} dB, {then.accuracy} in the baseline")
    for name in measurements.broken:
        if name not in then.broken:
            yield Breach("baseline", name, f"{_BROKEN}; it did not in the baseline")


def _exceeded_budgets(
    measurements: Measurements, budgets: Budgets, before: Measurements | None
) -> Iterator[Breach]:
    if _too_low("headroom_bits", measurements, budgets.min_headroom, before, _BITS):
        text = f"headroom {measurements.headroom_bits:.2f} bits, {budgets.min_headroom:g} required"
        yield Breach("min-headroom", measurements.headroom_site or "", text)
    if _too_low("sqnr_db", measurements, budgets.min_sqnr, before, _DB):
        yield Breach("min-sqnr", "outputs", f"{measurements.sqnr_db:.1f} dB, {budgets.min_sqnr:g} required")
    for name in measurements.broken if budgets.min_sqnr is not None else ():
        if before is None or name not in before.broken:
            yield Breach("min-sqnr", name, f"{_BROKEN}; {budgets.min_sqnr:g} dB required")
    drop, most = measurements.metric_drop, budgets.max_metric_drop
    accepted = before.metric_drop if before is not None else None
    if most is not None and drop is not None:
        allowed = most if accepted is None else max(most, accepted * _GROWTH)
        if not drop <= allowed + _ROUNDING:
            fp32, low = measurements.metric_fp32, measurements.metric_lower
            text = f"{fp32:.6g} in FP32, {low:.6g} in 16 bits: a drop of {drop:.3g}, at most {most:g} allowed"
            if math.isnan(drop):
                text = "NaN or infinite in FP32 already: there is no drop to compare"
            yield Breach("max-metric-drop", "metric", text)
    share, most = measurements.fp32_share, budgets.max_fp32_share
    if most is not None and share > most and (before is None or share - before.fp32_share > _SHARE):
        text = f"{share:.1%} of the computing sites are in float32, at most {most:.1%} allowed"
        yield Breach("max-fp32-share", "graph", text)


def _too_low(
    name: str, measurements: Measurements, least: float | None, before: Measurements | None, slack: float
) -> bool:
    """Return whether a number is below its limit and, with a baseline, below its earlier value as well."""
    value = getattr(measurements, name)
    if value is None or least is None or value >= least:
        return False
    if before is None:
        return True
    old = getattr(before, name)
    return bool((math.inf if old is None else old) - value > slack)
