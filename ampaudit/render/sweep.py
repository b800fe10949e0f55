"""Renders a sweep: the verdict at each size, where sites would overflow beyond, and a small chart."""

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
    """Return the verdicts in a clause: ``length 64, 256 pass, and 21840 would overflow (extrapolated)``."""
    said = []
    for verdict, one, several in _VERBS:
        values = [str(found.value) for found in sweep.values if found.verdict == verdict]
        if values:
            said.append(f"{', '.join(values)} {one if len(values) == 1 else several}")
    ahead = "" if sweep.soonest is None else f", and {sweep.soonest.crossing} would overflow (extrapolated)"
    return f"{sweep.axis} {', '.join(said)}{ahead}"


def sweep_sections(sweep: Sweep, *, full: bool = True) -> Iterator[Section]:
    """Return one row per size, then one per site that overflows at a size."""
    rows: list[list[str | Line]] = []
    axis = escape_control(sweep.axis)
    for found in sweep.values:
        bits = "" if found.headroom_bits is None else f"{found.headroom_bits:.1f} bits"
        word = line((found.verdict.upper(), _STYLES[found.verdict]))
        breaks = str(found.errors) if found.errors else ""
        rows.append(
            [f"{found.value:,}", word, breaks, bits, escape_control(found.nearest or ""), found.output]
        )
    table = tabulate((axis, "", "breaks", "least headroom", "at", "output"), rows, left=("", "at"))
    missed = [found for found in sweep.values if found.verdict == "not run"]
    remarks = [line(f"{found.value:,} was not run: {found.problem}") for found in missed]
    if len(sweep.values) - len(missed) > 1:
        remarks.append(line(f"The rest of this report is about {sweep.axis} {sweep.shown:,}."))
    yield Section((table, *remarks), f"Sweep over {sweep.axis}")
    if sweep.growth:
        growth = sweep.growth if full else sweep.growth[:_SHOWN]
        heads = ("site", f"overflows at {axis}", "between", "peak grows", "")
        made = tabulate(heads, [_cells(found, axis) for found in growth], left=("peak grows", ""))
        yield Section((made,), "Growth with size")


def _cells(found: SizeGrowth, axis: str) -> list[str | Line]:
    high = "?" if found.high is None else f"{found.high:,}"
    sizes = sum(peak is not None for peak in found.peaks)
    form = {
        "power": f"as {axis}^{found.exponent or 0:.2f}",
        "linear": "linearly",
        "logarithmic": "as a logarithm",
    }
    fit = f"{form[found.form]}, R^2 {found.r_squared:.4f} of {sizes} sizes"
    how = ("extrapolated", "yellow") if found.extrapolated else ("between sizes that were run", "")
    return [
        escape_control(found.site),
        f"{found.crossing:,}",
        f"{found.low:,} and {high}",
        fit,
        line(how),
    ]


def sweep_chart(sweep: Sweep) -> Markup:
    """Draw the least headroom over the size, both in powers of two, as SVG; empty with one point."""
    points = [(found.value, found.headroom_bits) for found in sweep.values if found.headroom_bits is not None]
    if len(points) < 2:
        return Markup("")
    ahead = sweep.soonest
    ends = [*points, *([] if ahead is None else [(ahead.crossing, 0.0)])]
    left, right = (math.log2(ends[index][0]) for index in (0, -1))
    top, bottom = max(*(bits for _, bits in points), 1.0), min(*(bits for _, bits in points), 0.0)

    def at(value: float, bits: float) -> tuple[float, float]:
        x = _MARGIN + (math.log2(value) - left) / ((right - left) or 1.0) * (_WIDTH - 2 * _MARGIN)
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
    said = f"Least headroom in bits over {sweep.axis}; below the line, values overflow."
    said += "" if ahead is None else " Dashed: extrapolated."
    return Markup(
        '<figure><figcaption>{said}</figcaption><svg role="img" aria-label="{said}" viewBox="0 0 {width} '
        '{height}" style="width:100%;max-width:{width}px">{parts}</svg></figure>'
    ).format(said=escape_control(said), width=_WIDTH, height=_HEIGHT, parts=Markup("".join(parts)))
