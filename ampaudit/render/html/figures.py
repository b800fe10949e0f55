"""Collects the data behind the charts of a page, by column to keep the file small."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ampaudit.core.formats import format_named
from ampaudit.core.text import escape_control, short_op
from ampaudit.render.findings import TOP, relative_path
from ampaudit.report.bench import PARTS, BenchReport, BenchRow
from ampaudit.report.finding import Severity
from ampaudit.report.gradients import BackwardReport
from ampaudit.report.model import Report, SiteReport

__all__ = ["bench_data", "figure_data"]


_SHARES = 1e-4  # unit of a histogram's shares; smaller bars are invisible
_ALIKE = ("layer", "type", "op", "precision", "verdict", "rule", "why", "file", "findings", "worst")


def figure_data(report: Report) -> dict[str, Any]:
    """Return one report's data for the scripts: the format, a row per measured site, loss scales."""
    form = format_named(report.run.dtype)
    static = report.run.level == "static"  # there, bounds are all that is known
    measured = [s for s in report.sites if s.forward or s.gradient or (static and s.bound is not None)]
    return {
        "dtype": form.name,
        "label": f"{escape_control(report.run.policy)}, {form.name}",
        "max": form.max,
        "minNormal": form.min_normal,
        "minSubnormal": form.min_subnormal,
        "level": report.run.level,
        "lossScale": report.backward.loss_scale if report.backward is not None else 1.0,
        "sites": _columns(list(_rows(report, measured))),
        "scales": _scales(report.backward) if report.backward is not None else None,
    }


def _rows(report: Report, sites: Sequence[SiteReport]) -> Iterable[dict[str, Any]]:
    codes = report.codes_by_site
    worst: dict[str, str] = {}
    wrong: dict[str, set[str]] = {"forward": set(), "backward": set()}
    evidence: dict[str, list[list[str]]] = {}
    for finding in report.active:
        if finding.evidence.in_words:
            measured = [finding.code, escape_control(finding.evidence.in_words)]
            for name in dict.fromkeys((finding.site, finding.evidence.about.removeprefix("gradient of "))):
                evidence.setdefault(name, []).append(measured)
        if finding.severity is not Severity.NOTE:  # the gravest come first
            worst.setdefault(finding.site, finding.severity.value)
        if finding.severity is Severity.ERROR:
            if finding.phase == "backward":
                wrong["backward"] |= {finding.site, *finding.poisons}
            else:
                wrong["forward"].add(finding.site)
    for site in sites:
        line = site.source.evident if site.source is not None else None
        yield {
            "site": escape_control(site.site),
            "layer": escape_control(site.layer or TOP),
            "type": escape_control(site.layer_type),
            "op": escape_control(short_op(site.op)),
            "precision": site.precision,
            "verdict": site.verdict,
            "rule": escape_control(site.rule or site.role),
            "why": escape_control(site.why),
            "file": escape_control(relative_path(line.file)) if line is not None else "",
            "line": line.line if line is not None else 0,
            "findings": " ".join(dict.fromkeys(codes[site.site])),
            "evidence": evidence.get(site.site, []),
            "worst": worst.get(site.site, ""),
            "bad": int(site.site in wrong["forward"]),
            "gbad": int(site.site in wrong["backward"]),
            "weight": int(site.role == "weight-cast"),
            "design": int(site.by_design),
            "bound": _short(site.bound),
            **_forward(site),
            **_gradient(site),
        }


def _forward(site: SiteReport) -> dict[str, Any]:
    forward = site.forward
    return {
        "peak": _short(forward.peak if forward else None),
        "low": _short(forward.min_nonzero if forward else None),
        "head": _short(forward.headroom_bits if forward else None),
        "sqnr": _short(forward.sqnr_db if forward else None),
        "alone": _short(forward.local_sqnr_db if forward else None),
        "inf": forward.inf if forward else 0,
        "nan": forward.nan if forward else 0,
        "count": forward.elements if forward else 0,
        "bins": _bins(forward.exponents) if forward else [],
    }


def _gradient(site: SiteReport) -> dict[str, Any]:
    gradient = site.gradient
    return {
        "gpeak": _short(gradient.peak if gradient else None),
        "ghead": _short(gradient.headroom_bits if gradient else None),
        "glower": int(gradient is not None and gradient.low_precision),
        "gbroke": gradient.inf + gradient.nan if gradient else 0,
        "gcount": gradient.elements if gradient else 0,
        "gflushed": _short(gradient.flushed if gradient else None),
        "gbins": _bins(gradient.exponents) if gradient else [],
    }


def _bins(exponents: dict[int, int]) -> list[int]:
    """Return the first exponent, then the share of it and of each following one in units of 1e-4."""
    total = sum(exponents.values())
    visible = {e: n for e, n in exponents.items() if n >= _SHARES * total}
    if not visible:
        return []
    first, last = min(visible), max(visible)
    return [first, *(round(visible.get(e, 0) / total / _SHARES) for e in range(first, last + 1))]


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return columns; repeated texts are stored once, as a list and indices into it."""
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}
    for name in _ALIKE if rows else ():
        texts = list(dict.fromkeys(columns[name]))
        places = {text: index for index, text in enumerate(texts)}
        columns[name] = {"texts": texts, "at": [places[text] for text in columns[name]]}
    return columns


def _scales(backward: BackwardReport) -> dict[str, Any] | None:
    advice = backward.advice
    if advice is None:
        return None
    return {
        "scale": math.log2(backward.loss_scale),
        "low": advice.low,
        "high": advice.high,
        "suggested": backward.suggested,
        "rows": [[row.exponent, _short(row.flushed), row.overflowing] for row in advice.rows],
        "layers": [
            [
                escape_control(layer.layer or TOP),
                layer.low,
                layer.high,
                _short(layer.flushed),
                escape_control(layer.high_at),
            ]
            for layer in advice.layers
        ],
    }


def _short(value: float | None) -> float | None:
    """Round to four digits, the resolution of a picture, except what ``format_number`` shows in full."""
    if value is None or (float(value).is_integer() and abs(value) < 1e5):
        return value
    return float(f"{value:.4g}")


def bench_data(report: BenchReport) -> list[dict[str, Any]]:
    """Return a row per mode: megabytes by part, scaled to the measured peak, and samples per second."""
    several = len({row.batch_size for row in report.rows}) > 1
    ran = [row for row in report.rows if row.status == "ok" and row.seconds and row.least and row.most]
    return [_row(row, several) for row in ran]


def _row(row: BenchRow, several: bool) -> dict[str, Any]:
    peak = (row.peak_bytes or 0) / 1e6
    whole = row.memory.peak if row.memory is not None else 0
    parts = {part: getattr(row.memory, part) / whole * peak for part in PARTS} if whole else {"peak": peak}
    return {
        "name": f"{row.mode}, {row.batch_size}" if several else row.mode,
        "peak": peak,
        "parts": parts,
        "speed": row.per_second,
        "slowest": row.batch_size / (row.most or 1.0),
        "fastest": row.batch_size / (row.least or 1.0),
        "finite": row.finite,
        "sqnr": row.sqnr_db,
    }
