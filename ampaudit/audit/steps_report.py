"""Builds the report of an audit's steps from its record."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from ampaudit.core.decibels import ratio_db
from ampaudit.core.sites import SiteId
from ampaudit.report.steps import StepGrowth, StepReport, StepsReport, doubling_time
from ampaudit.run.record import RunRecord, StepObservation

__all__ = ["steps_report"]

_SATURATES = 0.3  # relative error from which growth saturates


def steps_report(
    record: RunRecord, min_sqnr: float, limit: float, low_precision: Collection[SiteId]
) -> StepsReport | None:
    """Return the report; ``None`` for an audit without ``--steps``.

    Args:
        record: Record of the run.
        min_sqnr: Required accuracy of outputs in dB.
        limit: Largest number of the 16-bit format.
        low_precision: Sites with values in this format.
    """
    if not record.steps:
        return None
    by_step: defaultdict[int, list[StepObservation]] = defaultdict(list)
    for row in record.steps:
        by_step[row.step].append(row)
    growth = (*_error_growth(by_step, min_sqnr), *_value_growth(record, len(by_step), limit, low_precision))
    rows = tuple(_step(step, observations) for step, observations in by_step.items())
    return StepsReport(record.traces, rows, growth, record.fed_back)


def _step(step: int, rows: Sequence[StepObservation]) -> StepReport:
    accuracies = [
        (decibels, name)
        for row in rows
        for name, (error, signal) in row.errors.items()
        if (decibels := ratio_db(signal, error)) < math.inf
    ]
    accuracy, output = min(accuracies, default=(math.inf, ""))
    headrooms = [(row.headroom_bits, row.headroom_at) for row in rows if row.headroom_bits is not None]
    bits, site = min(headrooms, default=(None, ""))
    return StepReport(
        step=step,
        accuracy_db=round(accuracy, 3) if math.isfinite(accuracy) else None,
        output=output,
        headroom_bits=None if bits is None else round(bits, 4),
        headroom_at=site,
        origins=tuple(dict.fromkeys(str(site) for row in rows for site in row.origins)),
        broken_inputs=tuple(dict.fromkeys(fault.name for row in rows for fault in row.faults)),
        flipped=tuple(dict.fromkeys(name for row in rows for name in row.flipped)),
        poisoned=any(row.poisoned for row in rows),
    )


def _error_growth(by_step: dict[int, list[StepObservation]], min_sqnr: float) -> Iterator[StepGrowth]:
    """Yield the growth of the output with the largest error at the last step that is fitted."""
    candidates: list[tuple[float, StepGrowth]] = []
    for name in dict.fromkeys(name for rows in by_step.values() for row in rows for name in row.errors):
        points: list[tuple[int, float]] = []
        for step, rows in by_step.items():
            error = max((_relative(*row.errors[name]) for row in rows if name in row.errors), default=0.0)
            if error > _SATURATES:
                break
            if error > 0.0:
                points.append((step, error))
        fitted = doubling_time(points)
        if fitted is not None:
            every, last = fitted
            reaches = points[-1][0] + (-min_sqnr / 20 * math.log2(10) - last) * every
            soon = math.ceil(max(reaches, 1)) if reaches <= 2 * len(by_step) else None
            candidates.append((last, StepGrowth("error", name, round(every, 2), soon)))
    if candidates:
        yield max(candidates, key=lambda item: item[0])[1]


def _relative(error: float, signal: float) -> float:
    return math.sqrt(error / signal) if signal > 0.0 and math.isfinite(error) else 0.0


def _value_growth(
    record: RunRecord, count: int, limit: float, low_precision: Collection[SiteId]
) -> Iterator[StepGrowth]:
    """Yield the growth of the values that leave the range first, or else grow fastest."""
    candidates: list[StepGrowth] = []
    for site, stats in record.observations.items():
        if site not in low_precision:
            continue
        peaks: defaultdict[int, float] = defaultdict(float)
        for call, peak in sorted(stats.batch_peaks.items()):
            step = call % count + 1
            peaks[step] = max(peaks[step], peak)
        points = [(step, peak) for step, peak in sorted(peaks.items()) if peak > 0.0]
        fitted = doubling_time(points)
        if fitted is not None:
            every, last = fitted
            reaches = math.ceil(points[-1][0] + (math.log2(limit) - last) * every)
            soon = reaches if 0 < reaches <= 2 * count else None
            candidates.append(StepGrowth("values", site, round(every, 2), soon))
    if candidates:
        yield min(candidates, key=lambda growth: (growth.reaches or math.inf, growth.doubles_every))
