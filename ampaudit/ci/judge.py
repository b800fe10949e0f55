"""Compares a report with budgets and with a baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ampaudit.core.errors import UsageError, did_you_mean
from ampaudit.core.untrusted import describe
from ampaudit.report.check import Breach, Budgets, KnownFinding, KnownTarget, Measurements
from ampaudit.report.finding import threshold
from ampaudit.report.model import Report
from ampaudit.report.pages import all_pages

__all__ = ["Judgement", "check_codes", "judge", "known_target", "measured_in"]

# smaller changes are rounding: another order of a sum, another version of a kernel
_BITS, _DB, _SHARE, _ROUNDING = 0.05, 0.5, 1e-9, 1e-12
# what is healthy may vary more: a site lose half of its headroom, or one bit; an output have twice the error
_FALL_BITS, _FALL_DB = 1.0, 6.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """What budgets make of a report.

    Attributes:
        breaches: what counts: with a baseline, what is new or worse.
        known: what would count without the baseline.
        gone: findings of the baseline that no longer occur.
    """

    breaches: tuple[Breach, ...]
    known: tuple[Breach, ...] = ()
    gone: tuple[KnownFinding, ...] = ()


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
                f"--allow {describe(code)}: no such check",
                hint=f"{did_you_mean(code, known)}'ampaudit explain' lists all codes",
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
    report: Report, seen: Measurements, budgets: Budgets, baseline: KnownTarget | None = None
) -> Judgement:
    """Compare what a report has and what was measured with budgets, and with what a baseline accepts."""
    counted = list(_counted(report, budgets))
    if baseline is None:
        return Judgement((*(breach for breach, _ in counted), *_numbers(seen, budgets, None)))
    accepted = {(finding.code, finding.site): finding for finding in baseline.findings}
    breaches: list[Breach] = []
    known: list[Breach] = []
    for breach, finding in counted:
        before = accepted.get((finding.code, finding.site))
        worse = _worse(finding, before) if before is not None else ""
        if before is None:
            breaches.append(breach)
        elif worse:
            breaches.append(replace(breach, what=f"{worse}; {breach.what}"))
        else:
            known.append(breach)
    exceeded = list(_numbers(seen, budgets, baseline.measured))
    still = (breach for breach in _numbers(seen, budgets, None) if breach not in exceeded)
    occurring = {(f.code, f.site) for f in report.findings} | {(g.kind.code, g.op) for g in report.gaps}
    gone = tuple(finding for key, finding in accepted.items() if key not in occurring)
    falls = _falls(report, seen, baseline)
    return Judgement((*breaches, *exceeded, *falls), (*known, *still), gone)


def known_target(target: str, report: Report, seen: Measurements, budgets: Budgets) -> KnownTarget:
    """Return what a report has, as a baseline accepts it."""
    findings = KnownFinding.of_each_site(finding for _, finding in _counted(report, budgets))
    headroom = dict(sorted(_healthy(report)))
    return KnownTarget(target, report.run.policy, report.run.dtype, findings, headroom, seen)


def _healthy(report: Report) -> Iterator[tuple[str, float]]:
    for site in report.nearest_sites:
        if site.headroom_bits is not None:
            yield site.site, round(site.headroom_bits, 2)


def _counted(report: Report, budgets: Budgets) -> Iterator[tuple[Breach, KnownFinding]]:
    least = threshold(budgets.fail_on)
    for found in report.findings:
        if found.suppressed is None and found.code not in budgets.allow and found.severity.rank >= least:
            numbers = found.evidence.headroom_bits, found.evidence.sqnr_db
            breach = Breach(found.code, found.site, found.cause, found.severity, found.source)
            yield breach, KnownFinding(found.code, found.site, found.severity, *numbers)
    for gap in report.gaps if budgets.fail_on == "gap" else ():
        if gap.kind.code not in budgets.allow:
            breach = Breach(gap.kind.code, gap.site, gap.in_words)
            yield breach, KnownFinding(gap.kind.code, gap.op, breach.severity)


def _worse(now: KnownFinding, before: KnownFinding) -> str:
    """Return how a finding is worse than in the baseline, by more than rounding; empty if it is not."""
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


def _falls(report: Report, seen: Measurements, baseline: KnownTarget) -> Iterator[Breach]:
    """Yield healthy sites that have lost much of their headroom, and a loss of accuracy."""
    for site, bits in _healthy(report):
        before = baseline.headroom.get(site)
        if before is not None and before - bits > max(_FALL_BITS, before / 2):
            yield Breach("baseline", site, f"headroom {bits:.1f} bits, {before:.1f} in the baseline")
    then = baseline.measured
    exact = math.inf if then.accuracy == "exact" else None
    before = then.sqnr_db if then.sqnr_db is not None else exact
    if before is not None and seen.sqnr_db is not None and before - seen.sqnr_db > _FALL_DB:
        yield Breach("baseline", "outputs", f"{seen.sqnr_db:.1f} dB, {then.accuracy} in the baseline")


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
