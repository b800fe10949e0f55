"""Renders a sweep over sizes: the verdicts, the sizes at which sites overflow, and a chart of headroom."""

from __future__ import annotations

import math
from collections.abc import Iterator

from markupsafe import Markup

from ampaudit.core.text import escape_control
from ampaudit.render.blocks import Line, Section, line, tabulate
from ampaudit.report.extrapolation import SizeGrowth, Sweep

__all__ = ["sweep_chart", "sweep_sections", "sweep_words"]

_WIDTH, _HEIGHT, _MARGIN = 560, 150, 30
_STYLES = {"pass": "bold green", "fail": "bold red", "not run": "bold yellow"}
_VERBS = (("pass", "passes", "pass"), ("fail", "fails", "fail"), ("not run", "was not run", "were not run"))
_SHOWN = 5


def sweep_words(sweep: Sweep) -> str:
    """Summarize the verdicts: ``length 64, 256 pass, and 21840 would overflow (extrapolated)``."""
    clauses = []
    for verdict, one, several in _VERBS:
        values = [str(size.value) for size in sweep.values if size.verdict == verdict]
        if values:
            clauses.append(f"{', '.join(values)} {one if len(values) == 1 else several}")
    ahead = "" if sweep.soonest is None else f", and {sweep.soonest.crossing} would overflow (extrapolated)"
    return f"{sweep.axis} {', '.join(clauses)}{ahead}"


def sweep_sections(sweep: Sweep, *, full: bool = True) -> Iterator[Section]:
    """Render one row per size, then one per site that overflows at some size."""
    rows: list[list[str | Line]] = []
    axis = escape_control(sweep.axis)
    for size in sweep.values:
        bits = "" if size.headroom_bits is None else f"{size.headroom_bits:.1f} bits"
        word = line((size.verdict.upper(), _STYLES[size.verdict]))
        breaks = str(size.errors) if size.errors else ""
        rows.append([f"{size.value:,}", word, breaks, bits, escape_control(size.nearest or ""), size.output])
    table = tabulate((axis, "", "breaks", "least headroom", "at", "output"), rows, left=("", "at"))
    missed = [size for size in sweep.values if size.verdict == "not run"]
    remarks = [line(f"{size.value:,} was not run: {size.problem}") for size in missed]
    if len(sweep.values) - len(missed) > 1:
        remarks.append(line(f"The rest of this report is about {sweep.axis} {sweep.shown:,}."))
    yield Section((table, *remarks), f"Sweep over {sweep.axis}")
    if sweep.growth:
        growth = sweep.growth if full else sweep.growth[:_SHOWN]
        heads = ("site", f"overflows at {axis}", "between", "peak grows", "")
        rows = [_growth_cells(site, axis) for site in growth]
        yield Section((tabulate(heads, rows, left=("peak grows", "")),), "Growth with size")


def _growth_cells(growth: SizeGrowth, axis: str) -> list[str | Line]:
    high = "?" if growth.high is None else f"{growth.high:,}"
    sizes = sum(peak is not None for peak in growth.peaks)
    form = {
        "power": f"as {axis}^{growth.exponent or 0:.2f}",
        "linear": "linearly",
        "logarithmic": "as a logarithm",
    }
    fit = f"{form[growth.form]}, R^2 {growth.r_squared:.4f} of {sizes} sizes"
    how = ("extrapolated", "yellow") if growth.extrapolated else ("between sizes that were run", "")
    return [
        escape_control(growth.site),
        f"{growth.crossing:,}",
        f"{growth.low:,} and {high}",
        fit,
        line(how),
    ]


def sweep_chart(sweep: Sweep) -> Markup:
    """Draw the least headroom over the size, both in log2, as SVG; empty for fewer than two points."""
    points = [(size.value, size.headroom_bits) for size in sweep.values if size.headroom_bits is not None]
    if len(points) < 2:
        return Markup("")
    ahead = sweep.soonest
    ends = [*points, *([] if ahead is None else [(ahead.crossing, 0.0)])]
    start, right = (math.log2(ends[index][0]) for index in (0, -1))
    top, bottom = max(*(bits for _, bits in points), 1.0), min(*(bits for _, bits in points), 0.0)

    def at(value: float, bits: float) -> tuple[float, float]:
        x = _MARGIN + (math.log2(value) - start) / ((right - start) or 1.0) * (_WIDTH - 2 * _MARGIN)
        y = _MARGIN / 2 + (top - bits) / (top - bottom) * (_HEIGHT - 1.5 * _MARGIN)
        return round(x, 1), round(y, 1)

    def path(style: str, *corners: tuple[float, float]) -> str:
        joined = " ".join(f"{x},{y}" for x, y in corners)
        return f'<polyline points="{joined}" fill="none" {style}/>'

    solid = 'stroke="var(--lower)" stroke-width="2"'
    parts = [path('stroke="var(--bad)"', at(points[0][0], 0.0), at(ends[-1][0], 0.0))]
    parts.append(path(f'{solid} stroke-dasharray="5 4"', *(at(*point) for point in ends[-2:])))
    parts.append(path(solid, *(at(*point) for point in points)))
    for value, bits in points:
        x, y = at(value, bits)
        color = "var(--broken)" if bits < 0 else "var(--lower)"
        title = f"<title>{value:,}: {bits:.1f} bits</title>"
        parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{color}">{title}</circle>')
    label = f'y="{_HEIGHT - 2}" text-anchor="middle" font-size="11" fill="var(--soft)"'
    parts += [f'<text x="{at(value, 0.0)[0]}" {label}>{value:,}</text>' for value, _ in ends]
    caption = f"Least headroom in bits over {sweep.axis}; below the line, values overflow."
    caption += "" if ahead is None else " Dashed: extrapolated."
    return Markup(
        '<figure><figcaption>{said}</figcaption><svg role="img" aria-label="{said}" viewBox="0 0 {width} '
        '{height}" style="width:100%;max-width:{width}px">{parts}</svg></figure>'
    ).format(said=escape_control(caption), width=_WIDTH, height=_HEIGHT, parts=Markup("".join(parts)))
