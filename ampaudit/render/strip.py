"""Draws the headroom of a report's sites, in graph order, as a static SVG strip of colors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, pairwise

from ampaudit.core.text import escape_control
from ampaudit.report.finding import Severity
from ampaudit.report.model import Report

__all__ = ["Strip", "strip_svg", "strips_of"]

_CELLS = 40
# upper limits of headroom in bits, with colors that are legible on light and dark pages
_STEPS = ((1, "#e5734f"), (3, "#f4b183"), (6, "#c9dcec"), (10, "#8fbcdb"), (float("inf"), "#4a90c2"))
_BROKEN = "#b2182b"


@dataclass(frozen=True, slots=True)
class Strip:
    """The headroom of 16-bit values in graph order.

    Attributes:
        label: Description of the values.
        cells: Headroom in bits, whether the value breaks, and its name.
    """

    label: str
    cells: tuple[tuple[float, bool, str], ...]


def strips_of(report: Report) -> Iterator[Strip]:
    """Yield the strip of a report's values, then that of its gradients; empty strips are left out."""
    wrong: dict[bool, set[str]] = {True: set(), False: set()}
    for finding in report.active:
        if finding.severity is Severity.ERROR:
            wrong[finding.phase == "backward"] |= {finding.site, *finding.poisons}
    values = [
        (forward.headroom_bits, site.site in wrong[False] or forward.inf + forward.nan > 0, site.site)
        for site in report.low_precision_sites
        if (forward := site.forward) and forward.headroom_bits is not None
        if site.role != "weight-cast" and not site.by_design
    ]
    gradients = [
        (gradient.headroom_bits, site.site in wrong[True] or gradient.inf + gradient.nan > 0, site.site)
        for site in report.sites
        if (gradient := site.gradient) and gradient.low_precision and gradient.headroom_bits is not None
    ]
    for label, cells in (("headroom over depth", values), ("gradients times the loss scale", gradients)):
        if cells:
            yield Strip(label, tuple(cells))


def strip_svg(strip: Strip) -> str:
    """Return a strip as SVG, merging neighboring cells into their worst if there are more than 40."""
    count = min(len(strip.cells), _CELLS)
    bounds = [index * len(strip.cells) // count for index in range(count + 1)]
    worst = [min(strip.cells[a:b], key=_rank) for a, b in pairwise(bounds)]
    bars, x = [], 0
    for (color, broken), group in groupby(worst, lambda cell: (_color(cell), cell[1])):
        width = len(list(run := [*group]))
        title = f"<title>{_name(run)}</title>" if broken else ""
        bars.append(f'<rect x="{x}" width="{width}" height="1" fill="{color}">{title}</rect>')
        x += width
    bits, _, name = min(strip.cells, key=_rank)
    caption = escape(f"{strip.label}: least {bits:.1f} bits at {_short(name)}")
    return (
        f'<svg role="img" aria-label="{caption}" viewBox="0 0 {count} 1" preserveAspectRatio="none" '
        f'width="100%">{"".join(bars)}</svg><p class="soft">{caption}</p>'
    )


def _rank(cell: tuple[float, bool, str]) -> tuple[bool, float]:
    return not cell[1], cell[0]


def _color(cell: tuple[float, bool, str]) -> str:
    bits, broken, _ = cell
    return _BROKEN if broken or bits < 0 else next(color for limit, color in _STEPS if bits < limit)


def _name(cells: Sequence[tuple[float, bool, str]]) -> str:
    more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
    return escape(f"{_short(cells[0][2])}{more}")


def _short(name: str) -> str:
    safe = escape_control(name)
    return safe if len(safe) <= 60 else f"…{safe[-59:]}"
