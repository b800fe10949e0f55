"""Renders the ranking of roundings by the error that each makes in the outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

from ampaudit.core.text import escape_control, format_number, short_op
from ampaudit.render.blocks import Block, Section, line, tabulate
from ampaudit.render.documents.plan import stacked
from ampaudit.report.finding import Source
from ampaudit.report.noise import Noise

__all__ = ["format_accuracy", "line_text", "noise_section", "untrusted"]

_ROWS, _MAX_ROWS = 10, 200
_KINDS = {
    "weight": "(weight)",
    "cast": "(its casts)",
    "gradient": "(its backward)",
    "jump": "(jumps of its derivative)",
}
_FINITE = 3000.0  # dB; beyond it, the power of ten overflows
_DOUBLED = 3.0  # dB; beyond it, the error is over twice or under half of the prediction


def format_accuracy(value: float | None, *, broken: bool = False) -> str:
    """Format an accuracy: ``52.1 dB``, ``exact`` or ``inf or NaN``."""
    if broken:
        return "inf or NaN"
    if value is None:
        return "exact"
    return f"{value:.1f} dB" if abs(value) < 1e4 else f"{format_number(value)} dB"


def line_text(source: Source | None) -> str:
    """Format the file and line in the user's project; empty if unknown."""
    if source is None:
        return ""
    return escape_control(f"{PurePath(source.evident.file).name}:{source.evident.line}")


def noise_section(rows: Sequence[Noise], *, full: bool = False, of: str = "outputs") -> Section:
    """Render the error that each rounding causes, merged over stacked layers unless ``full``."""
    stacks = stacked(rows, lambda row: row.name, lambda row: (row.kind, row.op), full)
    groups = [(name, times, _summed(members)) for name, times, members in stacks]
    groups.sort(key=lambda group: -group[2].share)
    visible = groups[: _MAX_ROWS if full else _ROWS]
    what = f"Accuracy of the {of} if only this were rounded, and its share of the error of everything."
    heads = ("rounded", "times", "op", "accuracy", "share", "line")
    table = tabulate(heads, (_cells(*group) for group in visible), left=("op", "line"))
    blocks: list[Block] = [line(what, style="dim"), table]
    if len(visible) < len(groups):
        rest = sum(row.share for _, _, row in groups[len(visible) :])
        where = "the JSON report has them" if full else "-v shows more"
        blocks.append(
            line(f"and {len(groups) - len(visible):,} more, with {_share(rest)}; {where}", style="dim")
        )
    return Section(tuple(blocks), f"What makes the error of the {of}")


def _summed(rows: Sequence[Noise]) -> Noise:
    """Add up the errors of several values."""
    noise = sum(10.0 ** (-row.db / 10.0) for row in rows if row.db is not None and abs(row.db) < _FINITE)
    db = rows[0].db if len(rows) == 1 else -10.0 * math.log10(noise) if noise else None
    return replace(rows[0], db=db, share=sum(row.share for row in rows))


def _cells(name: str, times: str, row: Noise) -> tuple[str, ...]:
    op = short_op(row.op) if row.kind == "op" else _KINDS[row.kind]
    return (
        name,
        times,
        escape_control(op),
        format_accuracy(row.db),
        _share(row.share),
        line_text(row.source),
    )


def _share(share: float) -> str:
    return "<0.1%" if 0 < share < 5e-4 else f"{share:.1%}" if abs(share) < 1e4 else format_number(share)


def untrusted(predicted: float | None, measured: float | None) -> Iterator[Block]:
    """Warn if the predicted accuracy differs from the measured one by more than a factor of two."""
    if predicted is not None and measured is not None and abs(predicted - measured) > _DOUBLED:
        apart = f"The two differ by {abs(predicted - measured):.1f} dB"
        yield line(
            f"{apart}: the prediction takes errors to be small and independent, which they are not here. "
            "Trust what is measured.",
            style="yellow",
        )
