"""Renders a finding for people: location, evidence, cause and advice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ampaudit.core.sites import SourceLine
from ampaudit.render.blocks import Block, Indented, Labelled, Line, Section, line
from ampaudit.render.findings import Alert
from ampaudit.render.paths import relative_path
from ampaudit.report.finding import Severity, Trial

__all__ = ["finding_sections"]

_SEVERITY_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
_DIFF_STYLES = {"+": "green", "-": "red"}


def finding_sections(alerts: Iterable[Alert]) -> Iterator[Section]:
    """Return a section per finding, numbered; a diff that fixes several is shown once."""
    shown: set[str] = set()
    for number, alert in enumerate(alerts, 1):
        head = line(
            f"{number:>2}  ",
            (alert.layer, "bold"),
            f"  {alert.op}  " if alert.op else "  ",
            (f"{alert.code} {alert.title}", _SEVERITY_STYLES[alert.level]),
        )
        diffs = dict.fromkeys(t.diff for t in alert.trials if t.diff not in shown)
        shown |= diffs.keys()
        rows = (row for diff in diffs for row in _diff(diff))
        yield Section((head, Indented(tuple(_body(alert)), 4), *rows))


def _body(alert: Alert) -> Iterator[Block]:
    if alert.source is not None:
        yield line(*_place(alert.source))
    if alert.caller is not None:
        yield line(("called from ", "dim"), *_place(alert.caller))
    if alert.evidence:
        yield line(alert.evidence)
    rows: list[tuple[Line, tuple[Block, ...]]] = [(line("why", style="dim"), (line(alert.cause),))]
    if alert.poisons:
        rows.append((line("then", style="dim"), (line(alert.poisons),)))
    if not alert.trials:
        untried = " (not tried; --advise tries)" if alert.can_try else ""
        rows.append((line("next", style="dim"), (line(alert.advice, (untried, "dim")),)))
    yield Labelled((*rows, *map(_trial, alert.trials)))


def _trial(trial: Trial) -> tuple[Line, tuple[Block, ...]]:
    """Render a change that was tried."""
    label = line("cure", style="bold green") if trial.outcome == "cure" else line("fix", style="bold yellow")
    copied = () if trial.diff else (line(row, style="cyan") for row in trial.paste.splitlines())
    runs = (("before", trial.before), ("after", trial.after))
    compared = Labelled(tuple((line(name, style="dim"), (line(text),)) for name, text in runs))
    return label, (line(trial.change), *copied, compared)


def _place(place: SourceLine) -> tuple[str | tuple[str, str], ...]:
    where = (f"{relative_path(place.file)}:{place.line}", "cyan")
    return (where, f"  {place.code}") if place.code else (where,)


def _diff(diff: str) -> Iterator[Line]:
    """Render a diff unwrapped, so that ``patch`` accepts it."""
    for row in diff.splitlines():
        yield line(f"    {row}", style=_DIFF_STYLES.get(row[:1], "dim"), wrap=False)
