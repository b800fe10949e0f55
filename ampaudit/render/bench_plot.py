"""Plots memory and speed of each mode as two bar charts, with matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ampaudit.core.errors import UsageError
from ampaudit.core.files import check_writable
from ampaudit.render.documents.bench import BROKEN
from ampaudit.render.training_plot import figure_of, plain_text, save_figure
from ampaudit.report.bench import PARTS, BenchReport, BenchRow

__all__ = ["plot_bench"]

# Okabe and Ito (2008): distinguishable with color blindness
_COLOURS = ("#0072B2", "#56B4E9", "#E69F00", "#CC79A7", "#009E73")


def plot_bench(report: BenchReport, path: Path, *, force: bool = False) -> None:
    """Write the picture in the format of its suffix (png, svg, pdf).

    Raises:
        UsageError: matplotlib is missing, the suffix is none of its formats, or no mode ran.
        OutputError: the file exists and ``force`` is off.
    """
    check_writable(path, force=force)
    rows = [row for row in report.rows if row.status == "ok"]
    if not rows:
        raise UsageError("--plot: no mode ran", hint="see the table for the reasons")
    figure = figure_of(path, (10, 1.6 + 0.42 * len(rows)))
    memory, speed = figure.subplots(1, 2, sharey=True)
    names = [f"{plain_text(row.mode)}, {row.batch_size}" for row in rows]
    _memory(memory, rows)
    _speed(speed, rows)
    memory.set_yticks(range(len(rows)), names)
    memory.invert_yaxis()
    kind = "training step" if report.train else "forward pass"
    where = plain_text(report.device_name)
    figure.suptitle(
        f"{plain_text(report.model.source)}: a {kind} on {where}, by mode and batch size", fontsize=11
    )
    save_figure(figure, path, force=force)


def _memory(axes: Any, rows: list[BenchRow]) -> None:
    """Draw measured peaks, split like the prediction if there is one."""
    for place, row in enumerate(rows):
        peak = (row.peak_bytes or 0) / 1e6
        start, whole = 0.0, row.memory.peak if row.memory is not None else 0
        for part, colour in zip(PARTS, _COLOURS, strict=True):
            share = getattr(row.memory, part) / whole if whole else 0.0
            axes.barh(place, share * peak, left=start, color=colour, height=0.7)
            start += share * peak
        if not whole:
            axes.barh(place, peak, color="#999999", height=0.7)
        axes.text(peak, place, f" {peak:,.4g}", va="center", fontsize=8)
    handles = [(part, colour) for part, colour in zip(PARTS, _COLOURS, strict=True) if _has(rows, part)]
    for part, colour in handles:
        axes.barh(0, 0, color=colour, label=part)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=3)
    axes.set_xlabel("peak memory, MB")
    _clean(axes)


def _has(rows: list[BenchRow], part: str) -> bool:
    return any(row.memory is not None and getattr(row.memory, part) > 0 for row in rows)


def _speed(axes: Any, rows: list[BenchRow]) -> None:
    """Draw samples per second, with whiskers for the range; red if the result is not finite."""
    for place, row in enumerate(rows):
        assert row.seconds is not None
        assert row.least is not None
        assert row.most is not None
        value = row.batch_size / row.seconds
        spread = [[value - row.batch_size / row.most], [row.batch_size / row.least - value]]
        colour = "#D55E00" if row.finite is False else "#0072B2"
        axes.barh(place, value, xerr=spread, color=colour, height=0.7, ecolor="#444444", capsize=2)
        note = BROKEN if row.finite is False else ""
        note = f"{row.sqnr_db:.0f} dB" if row.sqnr_db is not None else note
        axes.text(row.batch_size / row.least, place, f" {value:,.4g}  {note}", va="center", fontsize=8)
    axes.set_xlabel("samples a second; accuracy against fp32 in dB")
    _clean(axes)


def _clean(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.margins(x=0.25)
