"""The numbers that the charts of a bench page are drawn from."""

from __future__ import annotations

from typing import Any

from ampaudit.render.bench_tables import row_name
from ampaudit.report.bench import PARTS, BenchReport, BenchRow

__all__ = ["bench_data"]


def bench_data(report: BenchReport) -> list[dict[str, Any]]:
    """A row per mode that ran: megabytes by part, scaled to what was measured, and samples a second."""
    ran = [row for row in report.rows if row.status == "ok" and row.seconds and row.least and row.most]
    return [_row(report, row) for row in ran]


def _row(report: BenchReport, row: BenchRow) -> dict[str, Any]:
    peak = (row.peak_bytes or 0) / 1e6
    whole = row.memory.peak if row.memory is not None else 0
    parts = {part: getattr(row.memory, part) / whole * peak for part in PARTS} if whole else {"peak": peak}
    return {
        "name": row_name(report, row),
        "peak": peak,
        "parts": parts,
        "speed": row.per_second,
        "slowest": row.batch_size / (row.most or 1.0),
        "fastest": row.batch_size / (row.least or 1.0),
        "finite": row.finite,
        "sqnr": row.sqnr_db,
    }
