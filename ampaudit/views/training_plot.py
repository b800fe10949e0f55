"""Plots loss curves, loss scales and gradient peaks of training runs, with matplotlib."""

from __future__ import annotations

import io
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ampaudit.core.errors import UsageError
from ampaudit.core.files import check_writable, write_bytes
from ampaudit.core.text import escape_control, plural
from ampaudit.report.bench import PARTS, BenchReport, BenchRow
from ampaudit.report.training import TrainingReport, Variant
from ampaudit.views.bench import BROKEN

# colors that readers with color blindness can tell apart (Okabe and Ito, 2008)
_PART_COLORS = ("#0072B2", "#56B4E9", "#E69F00", "#CC79A7", "#009E73")
_COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def plot_training(report: TrainingReport, path: Path, *, force: bool = False) -> None:
    """Write the picture in the format of its suffix (png, svg, pdf).

    Raises:
        UsageError: Matplotlib is missing, or does not support the format of the suffix.
        OutputExists: The file exists and ``force`` is off.
    """
    check_writable(path, force=force)
    figure = figure_of(path, (9, 7))
    loss, scale, gradient = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 2))
    _draw(report, loss, scale, gradient)
    optimizer, dtype = plain_text(report.optimizer), plain_text(report.dtype)
    figure.suptitle(f"{report.steps} steps of {optimizer}, {dtype} beside FP32")
    save_figure(figure, path, force=force)


def check_picture(path: Path) -> None:
    """Check that the picture can be written, before a long run.

    Raises:
        UsageError: Matplotlib is missing, or does not support the format of the suffix.
    """
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib", hint="pip install 'ampaudit[plots]'")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {path}: unknown kind of picture", hint="end the name in .png, .svg or .pdf")


def figure_of(path: Path, size: tuple[float, float]) -> Any:
    """Return an empty figure of a size in inches for a file.

    Raises:
        UsageError: Matplotlib is missing, or does not support the format of the suffix.
    """
    check_picture(path)
    import matplotlib.figure

    return matplotlib.figure.Figure(figsize=size, layout="constrained")


def plain_text(name: str) -> str:
    """Escape a name for a figure, where dollar signs would enclose a formula."""
    return escape_control(name).replace("$", r"\$")


def save_figure(figure: Any, path: Path, *, force: bool) -> None:
    """Write a figure in the format of the file's suffix.

    Raises:
        OutputError: The file cannot be written.
    """
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:], dpi=150)
    write_bytes(path, picture.getvalue(), force=force)


def _draw(report: TrainingReport, loss: Any, scale: Any, gradient: Any) -> None:
    for index, variant in enumerate(report.variants):
        health = variant.health
        style: dict[str, Any] = {"color": _COLORS[index % len(_COLORS)], "linewidth": 1.5}
        style |= {"linestyle": "-" if index == 0 else (0, (4 + index, 1 + index / 2))}
        steps = [record.step for record in health.steps]
        _mark_broken(variant, loss, style["color"])
        losses = [math.nan if record.loss is None else record.loss for record in health.steps]
        loss.plot(steps, losses, label=_label(variant), **style)
        scale.plot(steps, [record.scale for record in health.steps], **style)
        skipped = [record for record in health.steps if record.skipped]
        scale.plot([r.step for r in skipped], [r.scale for r in skipped], "x", color=style["color"])
        peaks = [_largest(variant, place) for place in range(len(health.watched))]
        gradient.plot(health.watched, peaks, marker=".", **style)
    loss.set_ylabel("loss")
    loss.legend(frameon=False)
    scale.set_yscale("log", base=2)
    scale.set_ylabel("loss scale\n(x: skipped)")
    gradient.set_yscale("log")
    gradient.set_ylabel("largest gradient")
    gradient.set_xlabel("step")
    for axes in (loss, scale, gradient):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)


def _label(variant: Variant) -> str:
    """Return the name of a run and the first steps whose loss is not finite."""
    name, steps = plain_text(variant.name), variant.health.recorded
    broken = [record.step for record in steps if record.broken]
    if not broken:
        return name
    if len(broken) == sum(record.step >= broken[0] for record in steps):
        return f"{name}: NaN or infinite from step {broken[0]}"
    return f"{name}: NaN or infinite in {plural(len(broken), 'step')} (marked X)"


def _mark_broken(variant: Variant, axes: Any, color: str) -> None:
    """Mark where a loss stops being finite, at the height of its last finite value."""
    last: float | None = None
    before = True
    for record in variant.health.recorded:
        if record.broken and before:
            axes.axvline(record.step, color=color, linestyle=":", linewidth=1)
            at, where = (last, axes.transData) if last is not None else (0.95, axes.get_xaxis_transform())
            axes.plot(
                record.step,
                at,
                "X",
                color=color,
                markersize=11,
                markeredgecolor="white",
                transform=where,
                zorder=5,
            )
        before = not record.broken
        last = last if record.loss is None else record.loss


def _largest(variant: Variant, place: int) -> float:
    rows = [p.gradient_peaks for p in variant.health.parameters if place < len(p.gradient_peaks)]
    return max((peak for row in rows if (peak := row[place])), default=math.nan)


def plot_bench(report: BenchReport, path: Path, *, force: bool = False) -> None:
    """Write the picture in the format of its suffix (png, svg, pdf).

    Raises:
        UsageError: Matplotlib is missing or does not support the format of the suffix, or no mode ran.
        OutputError: The file exists and ``force`` is off.
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
        for part, color in zip(PARTS, _PART_COLORS, strict=True):
            share = getattr(row.memory, part) / whole if whole else 0.0
            axes.barh(place, share * peak, left=start, color=color, height=0.7)
            start += share * peak
        if not whole:
            axes.barh(place, peak, color="#999999", height=0.7)
        axes.text(peak, place, f" {peak:,.4g}", va="center", fontsize=8)
    for part, color in zip(PARTS, _PART_COLORS, strict=True):
        if any(row.memory is not None and getattr(row.memory, part) > 0 for row in rows):
            axes.barh(0, 0, color=color, label=part)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=3)
    axes.set_xlabel("peak memory, MB")
    _clean(axes)


def _speed(axes: Any, rows: list[BenchRow]) -> None:
    """Draw samples per second, with whiskers for the range; red if the result is not finite."""
    for place, row in enumerate(rows):
        assert row.seconds is not None
        assert row.least is not None
        assert row.most is not None
        value = row.batch_size / row.seconds
        spread = [[value - row.batch_size / row.most], [row.batch_size / row.least - value]]
        color = "#D55E00" if row.finite is False else "#0072B2"
        axes.barh(place, value, xerr=spread, color=color, height=0.7, ecolor="#444444", capsize=2)
        note = BROKEN if row.finite is False else ""
        note = f"{row.sqnr_db:.0f} dB" if row.sqnr_db is not None else note
        axes.text(row.batch_size / row.least, place, f" {value:,.4g}  {note}", va="center", fontsize=8)
    axes.set_xlabel("samples a second; accuracy against fp32 in dB")
    _clean(axes)


def _clean(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25)
    axes.margins(x=0.25)
