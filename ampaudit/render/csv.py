"""Flat tables for spreadsheets and data frames: one row per site, or per parameter of a training run.

Names are snake_case and hold their unit, numbers are plain, what does not exist is empty: pandas, polars and
pyarrow read the columns in their types.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping

from ampaudit.core.errors import UsageError
from ampaudit.core.text import escape_control
from ampaudit.report.bench import PARTS, BenchReport
from ampaudit.report.comparison import Comparison
from ampaudit.report.documents import Document
from ampaudit.report.model import Report
from ampaudit.report.plan import PlanReport
from ampaudit.report.site import SiteReport
from ampaudit.report.training import TrainingReport

__all__ = ["to_csv"]

Cell = str | int | float | None
_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would run what begins so


def to_csv(document: Document) -> str:
    """The table; the first row names the columns.

    Raises:
        UsageError: results of ``ampaudit check``, a conversion and a verification have no sites.
    """
    rows = list(_rows(document))
    stream = io.StringIO()
    if rows:
        writer = csv.DictWriter(stream, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return stream.getvalue()


def _rows(document: Document) -> Iterable[Mapping[str, Cell]]:
    if isinstance(document, Report):
        return _sites(document)
    if isinstance(document, Comparison):
        return [row for report in document.reports for row in _sites(report)]
    if isinstance(document, TrainingReport):
        return _parameters(document)
    if isinstance(document, PlanReport):
        return _planned(document)
    if isinstance(document, BenchReport):
        return _modes(document)
    raise UsageError("this report has no table of sites", hint="use --format text or json")


def _cell(value: Cell) -> Cell:
    if not isinstance(value, str):
        return value
    text = escape_control(value)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _sites(report: Report) -> Iterable[Mapping[str, Cell]]:
    codes = report.codes_by_site
    for index, site in enumerate(report.sites):
        line = site.source
        yield {
            "policy": report.run.policy,
            "dtype": report.run.dtype,
            "index": index,
            "site": site.site,
            "layer": site.layer,
            "layer_type": site.layer_type,
            "op": site.op,
            "role": site.role,
            "precision": site.precision,
            "shape": "x".join(map(str, site.shape)),
            "rule": site.rule,
            "reason": site.reason,
            "verdict": site.verdict,
            "by_design": int(site.by_design),
            "findings": " ".join(codes[site.site]),
            **_forward(site),
            "bound": site.bound,
            **_gradient(site),
            "file": line.file if line is not None else None,
            "line": line.line if line is not None else None,
        }


def _forward(site: SiteReport) -> Mapping[str, Cell]:
    names = ("peak", "min_nonzero", "headroom_bits", "inf", "nan", "elements", "sqnr_db", "local_sqnr_db")
    shares = ("max_error", "max_relative_error", "flushed", "subnormal")
    return {name: getattr(site.forward, name, None) for name in (*names, *shares)}


def _gradient(site: SiteReport) -> Mapping[str, Cell]:
    names = ("precision", "peak", "headroom_bits", "inf", "nan", "flushed", "sqnr_db")
    return {f"gradient_{name}": getattr(site.gradient, name, None) for name in names}


def _parameters(report: TrainingReport) -> Iterable[Mapping[str, Cell]]:
    names = ("elements", "zero", "flushed", "broken", "update_ratio", "lost", "state_flushed")
    for variant in report.variants:
        for parameter in variant.health.parameters:
            peaks = [peak for peak in parameter.gradient_peaks if peak is not None]
            yield {
                "run": variant.name,
                "parameter": parameter.name,
                "gradient_peak": max(peaks, default=None),
                **{name: getattr(parameter, name) for name in names},
            }


def _planned(plan: PlanReport) -> Iterable[Mapping[str, Cell]]:
    names = ("site", "layer", "op", "role", "precision", "rule", "reason", "casts", "cast_bytes")
    for site in plan.sites:
        yield {"policy": plan.policy, "dtype": plan.dtype, **{name: getattr(site, name) for name in names}}


def _modes(report: BenchReport) -> Iterable[Mapping[str, Cell]]:
    names = (
        "mode",
        "batch_size",
        "status",
        "seconds",
        "least",
        "most",
        "per_second",
        "peak_bytes",
        "workspace_bytes",
        "sqnr_db",
        "at_best",
    )
    for row in report.rows:
        yield {
            "device": report.device_name,
            "train": int(report.train),
            **{name: getattr(row, name) for name in names},
            "finite": None if row.finite is None else int(row.finite),
            **{f"predicted_{name}": getattr(row.memory, name, None) for name in (*PARTS, "peak")},
            **{
                name: getattr(row.work, name, None)
                for name in ("flops", "fast_share", "bytes_moved", "cast_bytes")
            },
        }
