"""Draws accuracy against the share of ops in float32: as SVG for a page, and with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ampaudit.core.errors import UsageError
from ampaudit.core.files import check_writable
from ampaudit.core.text import escape_control, plural
from ampaudit.report.tuning import TuningReport
from ampaudit.views.training_plot import figure_of, plain_text, save_figure
from ampaudit.views.tuning_tables import format_accuracy, point_words

_HEIGHT, _MARGIN = 300, 26  # of the SVG, and within it above and below the points
_MAX_DB = 150.0
_LETTERS = 14  # height of a line of text
_ACCURACY, _SHARE = "Accuracy of the outputs in dB", "share of ops in float32"


@dataclass(frozen=True, slots=True)
class _Mark:
    """A point of the chart with its coordinates, its tooltip and its index in the frontier."""

    share: float
    db: float
    title: str
    number: int | None = None


@dataclass(frozen=True, slots=True)
class _Picture:
    """The content of the SVG and the matplotlib chart."""

    predicted: tuple[_Mark, ...]  # points of the frontier with their predicted accuracy
    measured: tuple[_Mark, ...]  # points of the frontier with their measured accuracy
    named: tuple[tuple[str, _Mark], ...]  # everything in 16 bits and the chosen point, with their styles
    target: float | None  # required accuracy; ``None`` without one

    @property
    def line(self) -> list[_Mark]:
        """The predicted points that no other beats in both accuracy and share."""
        best: list[_Mark] = []
        for mark in sorted(self.predicted, key=lambda mark: (mark.share, -mark.db)):
            if not best or mark.db > best[-1].db:
                best.append(mark)
        return best

    @property
    def marks(self) -> tuple[_Mark, ...]:
        return (*self.predicted, *self.measured, *(mark for _, mark in self.named))


def _picture(report: TuningReport) -> _Picture:
    """Collect the points of a report that have an accuracy: exact and broken outputs have none."""

    def marks(field: str) -> Iterator[_Mark]:
        for number, point in enumerate(report.frontier):
            db = _finite(getattr(point, field))
            if db is not None and 0 <= point.share <= 1 and not point.broken:
                yield _Mark(point.share, db, point_words(report, point), number)

    low, measured = _finite(report.low_db), _finite(report.measured_db)
    named = []
    if low is not None:
        named.append(("low", _Mark(0.0, low, f"everything in 16 bits, {format_accuracy(low)}")))
    if measured is not None and report.ops:
        count, at = len(report.kept), next((i for i, p in enumerate(report.frontier) if p.chosen), None)
        title = f"{count:,} of {plural(report.ops, 'op')}, {format_accuracy(measured)}"
        named.append(("chosen", _Mark(count / report.ops, measured, title, at)))
    target = _finite(report.target_db)
    return _Picture(tuple(marks("predicted_db")), tuple(marks("measured_db")), tuple(named), target)


def _finite(value: float | None) -> float | None:
    """Return an accuracy within the range of the chart: FP32 resolves 2^-24, which is 144 dB."""
    return value if value is not None and abs(value) <= _MAX_DB else None


def plot_tuning(report: TuningReport, path: Path, *, force: bool = False) -> None:
    """Write the picture in the format of its suffix (png, svg, pdf).

    Raises:
        UsageError: matplotlib is missing or does not support the suffix, or there is nothing to draw.
        OutputError: The file exists and ``force`` is off.
    """
    check_writable(path, force=force)
    picture = _picture(report)
    if not picture.marks:
        raise UsageError("--plot: the outputs are exact with every choice", hint="leave out --plot")
    figure = figure_of(path, (8, 4.5))
    axes = figure.subplots()
    _draw(axes, picture)
    figure.suptitle(f"{plain_text(report.model.source)} in {plain_text(report.dtype)}", fontsize=11)
    save_figure(figure, path, force=force)


def _draw(axes: Any, picture: _Picture) -> None:
    """Draw with colors that readers with color blindness can tell apart."""

    def at(marks: Sequence[_Mark]) -> tuple[list[float], list[float]]:
        return [100 * mark.share for mark in marks], [mark.db for mark in marks]

    axes.plot(*at(picture.line), "-", color="#0072B2", linewidth=1.5)
    axes.plot(*at(picture.predicted), ".", color="#0072B2", label="predicted")
    if picture.measured:
        axes.plot(*at(picture.measured), "o", color="#E69F00", markersize=7, label="measured")
    for name, mark in picture.named:
        style, color = ("D", "#D55E00") if name == "chosen" else ("s", "#555555")
        label = f"chosen: {mark.title}" if name == "chosen" else mark.title
        axes.plot(*at([mark]), style, color=color, markersize=8, label=label)
    if picture.target is not None:
        target = f"required: {format_accuracy(picture.target)}"
        axes.axhline(picture.target, color="#555555", linestyle="--", linewidth=1, label=target)
    axes.set_xlabel(f"{_SHARE.capitalize()} in %")
    axes.set_ylabel(_ACCURACY)
    axes.figure.legend(frameon=False, fontsize=9, loc="outside lower center", ncols=3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.margins(0.06, 0.12)
    axes.set_xlim(left=-3 * max(mark.share for mark in picture.marks))


def frontier_figure(report: TuningReport) -> Markup:
    """Return the chart as SVG whose points link to their rule files; empty without points.

    Horizontal positions are shares of the width, so that text keeps its size on a narrow page.
    """
    picture = _picture(report)
    marks = picture.marks
    if not marks:
        return Markup("")
    ends = [mark.db for mark in marks] + ([picture.target] if picture.target is not None else [])
    bottom, top, right = min(ends), max(ends), max(mark.share for mark in marks) or 1.0
    spread = (top - bottom) or 1.0

    def x(share: float) -> str:
        return f"{100 * share / right:.2f}%"

    def y(db: float) -> float:
        return round(_MARGIN + (top - db) / spread * (_HEIGHT - 2 * _MARGIN), 1)

    parts: list[Markup] = []
    for tick in _ticks(bottom, top):
        parts.append(_line("0", y(tick), "100%", y(tick), "grid"))
        parts.append(_label("-8", y(tick) + 4, f"{tick:g}", "end"))
    shares = _ticks(0.0, 100 * right)
    parts += (_label(x(tick / 100), _HEIGHT + 16, f"{tick:g} %", "middle") for tick in shares)
    for before, after in pairwise(picture.line):
        parts.append(_line(x(before.share), y(before.db), x(after.share), y(after.db), "predicted"))
    if picture.target is not None:
        height = y(picture.target)
        parts.append(_line("0", height, "100%", height, "asked"))
        parts.append(_label("100%", height - 6, f"{picture.target:g} dB required", "end"))
    circles = [(mark, 3.5, "predicted") for mark in picture.predicted]
    circles += [(mark, 4.5, "measured") for mark in picture.measured]
    circles += [(mark, 8.0 if name == "chosen" else 5.5, name) for name, mark in picture.named]
    parts += (_circle(x(mark.share), y(mark.db), radius, style, mark) for mark, radius, style in circles)
    heights = [y(picture.target)] if picture.target is not None else []
    for _, mark in reversed(picture.named):
        late, height = mark.share > right / 2, y(mark.db) + 15
        while any(abs(height - other) < _LETTERS for other in heights):
            height += 1
        heights.append(height)
        anchor, dx = ("end", -10) if late else ("start", 10)
        parts.append(_label(x(mark.share), height + 4, mark.title, anchor, dx))
    caption = f"{_ACCURACY}, against the {_SHARE}, from {format_accuracy(bottom)} to {format_accuracy(top)}"
    return Markup(
        '<figure class="frontier"><figcaption>{caption}</figcaption>{key}'
        '<svg role="group" aria-label="{said}" height="{height}">{parts}</svg></figure>'
    ).format(
        caption=f"{_ACCURACY}, against the {_SHARE}. Choose a point for its rule file.",
        key=_key(picture),
        said=caption,
        height=_HEIGHT + 24,
        parts=Markup("").join(parts),
    )


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round numbers between ``low`` and ``high``."""
    rough = (high - low) / count
    if not rough > 0 or not math.isfinite(rough):
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * factor for factor in (1, 2, 5) if power * factor >= rough), 10 * power)
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _line(x1: str, y1: float, x2: str, y2: float, style: str) -> Markup:
    template = Markup('<line x1="{}" y1="{}" x2="{}" y2="{}" class="{}"/>')
    return template.format(x1, y1, x2, y2, style)


def _label(x: str, y: float, text: str, anchor: str, dx: int = 0) -> Markup:
    template = Markup('<text x="{}" y="{}" dx="{}" text-anchor="{}">{}</text>')
    return template.format(x, y, dx, anchor, escape_control(text))


def _circle(x: str, y: float, radius: float, style: str, mark: _Mark) -> Markup:
    """Draw a point; points of the frontier link to their rule files."""
    template = Markup('<circle cx="{}" cy="{}" r="{}" class="{}"><title>{}</title></circle>')
    circle = template.format(x, y, radius, style, escape_control(mark.title))
    if mark.number is None:
        return circle
    return Markup('<a href="#choice-{}">{}</a>').format(mark.number + 1, circle)


def _key(picture: _Picture) -> Markup:
    """Return the legend for the kinds of points that exist."""
    marks_by_kind = {
        "predicted": picture.predicted,
        "measured": picture.measured,
        "chosen": dict(picture.named).get("chosen"),
    }
    template = Markup('<span><i class="{}"></i>{}</span>')
    entries = Markup("").join(template.format(name, name) for name, marks in marks_by_kind.items() if marks)
    return Markup('<div class="key">{}</div>').format(entries)
