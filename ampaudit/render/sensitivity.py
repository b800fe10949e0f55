"""Renders the ranking of roundings by the error that each makes in the outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

from ampaudit.core.text import escape_control, format_number, plural, short_op
from ampaudit.render.blocks import Block, Section, line, tabulate
from ampaudit.render.documents.plan import stacked
from ampaudit.report.finding import Source
from ampaudit.report.sensitivity import Noise, Sensitivity

__all__ = ["format_accuracy", "line_of", "noise_section", "sensitivity_sections", "untrusted"]

_ROWS, _MAX_ROWS = 10, 200
_KINDS = {
    "weight": "(weight)",
    "cast": "(its casts)",
    "gradient": "(its backward)",
    "jump": "(jumps of its derivative)",
}
_FINITE = 3000.0  # dB: whose power of ten can be computed
_DOUBLED = 3.0  # dB: beyond it the error is more than twice, or less than half of what was predicted


def format_accuracy(value: float | None, *, broken: bool = False) -> str:
    """Format an accuracy: ``52.1 dB``, ``exact`` or ``inf or NaN``."""
    if broken:
        return "inf or NaN"
    if value is None:
        return "exact"
    return f"{value:.1f} dB" if abs(value) < 1e4 else f"{format_number(value)} dB"


def line_of(source: Source | None) -> str:
    """Return the file and line to show in the user's project."""
    if source is None:
        return ""
    return escape_control(f"{PurePath(source.evident.file).name}:{source.evident.line}")


def noise_section(rows: Sequence[Noise], *, full: bool = False, of: str = "outputs") -> Section:
    """Return what is rounded and the error that this makes, merged over stacked layers unless ``full``."""
    groups = [(name, times, _together(members)) for name, times, members in _alike(rows, full)]
    groups.sort(key=lambda group: -group[2].share)
    shown = groups[: _MAX_ROWS if full else _ROWS]
    what = f"Accuracy of the {of} if only this were rounded, and its share of the error of everything."
    heads = ("rounded", "times", "op", "accuracy", "share", "line")
    table = tabulate(heads, (_cells(*group) for group in shown), left=("op", "line"))
    blocks: list[Block] = [line(what, style="dim"), table]
    if len(shown) < len(groups):
        rest = sum(row.share for _, _, row in groups[len(shown) :])
        where = "the JSON report has them" if full else "-v shows more"
        blocks.append(
            line(f"and {len(groups) - len(shown):,} more, with {_share(rest)}; {where}", style="dim")
        )
    return Section(tuple(blocks), f"What makes the error of the {of}")


def _alike(rows: Sequence[Noise], full: bool) -> Iterator[tuple[str, str, list[Noise]]]:
    return stacked(rows, lambda row: row.name, lambda row: (row.kind, row.op), full)


def _together(rows: Sequence[Noise]) -> Noise:
    """Add up the errors of several values."""
    noise = sum(10.0 ** (-row.db / 10.0) for row in rows if row.db is not None and abs(row.db) < _FINITE)
    db = rows[0].db if len(rows) == 1 else -10.0 * math.log10(noise) if noise else None
    return replace(rows[0], db=db, share=sum(row.share for row in rows))


def _cells(name: str, times: str, row: Noise) -> tuple[str, ...]:
    op = short_op(row.op) if row.kind == "op" else _KINDS[row.kind]
    return (name, times, escape_control(op), format_accuracy(row.db), _share(row.share), line_of(row.source))


def _share(share: float) -> str:
    return "<0.1%" if 0 < share < 5e-4 else f"{share:.1%}" if abs(share) < 1e4 else format_number(share)


def sensitivity_sections(found: Sensitivity, *, full: bool = False) -> Iterator[Section]:
    """Return the ranking, and whether it adds up to the error that was measured."""
    section = noise_section(found.rows, full=full, of=found.of)
    yield Section((*section.blocks, *_sum(found)), section.title)


def _sum(found: Sensitivity) -> Iterable[Block]:
    measured = format_accuracy(found.measured_db, broken=found.broken)
    how = f"all of them, from {plural(found.probes, 'backward pass')}"
    yield line(
        f"In {found.dtype}: {format_accuracy(found.predicted_db)} predicted as the sum of {how}; "
        f"{measured} measured."
    )
    yield from untrusted(found.predicted_db, found.measured_db)


def untrusted(predicted: float | None, measured: float | None) -> Iterator[Block]:
    """Warn where the sum of all roundings is not the error that was measured."""
    if predicted is not None and measured is not None and abs(predicted - measured) > _DOUBLED:
        apart = f"The two differ by {abs(predicted - measured):.1f} dB"
        yield line(
            f"{apart}: the prediction takes errors to be small and independent, which they are not here. "
            "Trust what is measured.",
            style="yellow",
        )
