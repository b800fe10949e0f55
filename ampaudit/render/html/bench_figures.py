"""Collects the numbers behind the charts of a benchmark page."""

from __future__ import annotations

from typing import Any

from ampaudit.report.bench import PARTS, BenchReport, BenchRow

__all__ = ["bench_data"]


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
