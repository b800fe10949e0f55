"""Renders the comparison with a reference: what differs, and which ops correspond."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampaudit.core.text import escape_control, listed
from ampaudit.render.blocks import Line, Section, line, tabulate
from ampaudit.report.against import AgainstReport

__all__ = ["against_sections"]

_SHOWN = 5


def against_sections(against: AgainstReport, *, full: bool = False) -> Iterator[Section]:
    """Render the ops that only one model has; with ``full``, also each matched pair."""
    reference = escape_control(against.reference)
    rows = [
        ("only here", _listed(against.only_here, full=full)),
        (f"only in {reference}", _listed(against.only_reference, full=full)),
    ]
    text = [line((f"{label}: ", "bold"), sites) for label, sites in rows if sites]
    yield Section((line(against.extent), *text), f"Against {reference}")
    if full and against.matched:
        pairs: list[list[str | Line]] = [
            [line((escape_control(pair.site), "code")), line((escape_control(pair.counterpart), "code"))]
            for pair in against.matched
        ]
        yield Section((tabulate(("op", "counterpart"), pairs, left=("op", "counterpart")),))


def _listed(sites: Sequence[str], *, full: bool) -> str:
    return listed(list(map(escape_control, sites)), len(sites) if full else _SHOWN)
