"""Compares a report with budgets and with an earlier report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from ampaudit.core.errors import UsageError, did_you_mean
from ampaudit.report.budgets import Breach, Budgets, Measurements
from ampaudit.report.finding import Finding, threshold
from ampaudit.report.model import Report
from ampaudit.report.pages import all_pages
from ampaudit.report.saved import read_scan_report

__all__ = ["breaches", "check_codes", "measured_in", "read_baseline"]

# smaller changes are rounding: another order of a sum, another version of a kernel
_BITS, _DB, _SHARE, _ROUNDING = 0.05, 0.5, 1e-9, 1e-12


def check_codes(allowed: str | Iterable[str]) -> tuple[str, ...]:
    """Return codes that are allowed, after a check that they exist.

    Raises:
        UsageError: naming the nearest one.
    """
    known = list(all_pages())
    if not isinstance(allowed, Iterable):
        raise UsageError(f"allow is of type {type(allowed).__name__}", hint="pass a list of codes")
    codes = (allowed,) if isinstance(allowed, str) else tuple(allowed)
    for code in codes:
        if code not in known:
            raise UsageError(
                f"--allow {code}: no such check",
                hint=f"{did_you_mean(code, known)}'ampaudit explain' lists all codes",
            )
    return codes


def read_baseline(path: Path) -> Report:
    """Read an earlier report written by ``scan --format json``.

    Raises:
        InputError: it is none.
    """
    return read_scan_report(path, f"--baseline {path}")


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


def breaches(
    report: Report, seen: Measurements, budgets: Budgets, baseline: Report | None = None
) -> Iterator[Breach]:
    """Yield counted findings and exceeded budgets; with a baseline, only what is new or worse."""
    known = {(f.code, f.site) for f in baseline.findings if _counts(f, budgets)} if baseline else set()
    for finding in report.findings:
        if _counts(finding, budgets) and (finding.code, finding.site) not in known:
            yield Breach(finding.code, finding.site, finding.cause, finding.severity, finding.source)
    if budgets.fail_on == "gap":
        open_before = {(gap.kind, gap.op) for gap in baseline.gaps} if baseline else set()
        for gap in report.gaps:
            if gap.kind.code not in budgets.allow and (gap.kind, gap.op) not in open_before:
                yield Breach(gap.kind.code, gap.site, gap.in_words)
    before = measured_in(baseline) if baseline else None
    yield from _numbers(seen, budgets, before)


def _counts(finding: Finding, budgets: Budgets) -> bool:
    if finding.suppressed is not None or finding.code in budgets.allow:
        return False
    return finding.severity.rank >= threshold(budgets.fail_on)


def _numbers(seen: Measurements, budgets: Budgets, before: Measurements | None) -> Iterator[Breach]:
    if _too_low("headroom_bits", seen, budgets.min_headroom, before, _BITS):
        text = f"headroom {seen.headroom_bits:.2f} bits, {budgets.min_headroom:g} required"
        yield Breach("min-headroom", seen.headroom_site or "", text)
    if _too_low("sqnr_db", seen, budgets.min_sqnr, before, _DB):
        yield Breach("min-sqnr", "outputs", f"{seen.sqnr_db:.1f} dB, {budgets.min_sqnr:g} required")
    for name in seen.broken if budgets.min_sqnr is not None else ():
        if before is None or name not in before.broken:
            yield Breach(
                "min-sqnr", name, f"holds inf or NaN, or nothing like FP32; {budgets.min_sqnr:g} dB required"
            )
    drop, most = seen.metric_drop, budgets.max_metric_drop
    if most is not None and drop is not None and not drop <= most + _ROUNDING:
        text = f"{seen.metric_fp32:.6g} in FP32, {seen.metric_lower:.6g} in 16 bits: a drop of {drop:.3g}"
        yield Breach("max-metric-drop", "metric", f"{text}, at most {most:g} allowed")
    share, most = seen.fp32_share, budgets.max_fp32_share
    if most is not None and share > most and (before is None or share - before.fp32_share > _SHARE):
        text = f"{share:.1%} of the computing sites are in float32, at most {most:.1%} allowed"
        yield Breach("max-fp32-share", "graph", text)


def _too_low(
    name: str, seen: Measurements, least: float | None, before: Measurements | None, slack: float
) -> bool:
    """Return whether a number is below its limit and, with a baseline, worse by more than rounding."""
    value = getattr(seen, name)
    if value is None or least is None or value >= least:
        return False
    if before is None:
        return True
    old = getattr(before, name)
    return bool((math.inf if old is None else old) - value > slack)
