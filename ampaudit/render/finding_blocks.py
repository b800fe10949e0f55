"""Renders a finding for people: location, evidence, cause and advice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ampaudit.core.sites import SourceLine
from ampaudit.render.blocks import Block, Indented, Labelled, Line, Section, line
from ampaudit.render.findings import Alert
from ampaudit.render.paths import relative_path
from ampaudit.report.finding import CombinedPolicy, Outcome, Severity, Trial

__all__ = ["combined_section", "finding_sections"]

_SEVERITY_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
_DIFF_STYLES = {"+": "green", "-": "red"}


def finding_sections(alerts: Iterable[Alert]) -> Iterator[Section]:
    """Return a section per finding, numbered; a diff, or a function that code calls, is shown once."""
    shown: set[str] = set()
    for number, alert in enumerate(alerts, 1):
        head = line(
            f"{number:>2}  ",
            (f"{alert.level.value}  ", _SEVERITY_STYLES[alert.level]),
            (alert.layer, "bold"),
            f"  {alert.op}  " if alert.op else "  ",
            (f"{alert.code} {alert.title}", _SEVERITY_STYLES[alert.level]),
        )
        diffs = dict.fromkeys(t.diff for t in alert.trials if t.diff not in shown)
        shown |= diffs.keys()
        rows = (row for diff in diffs for row in _diff(diff))
        trials = [block for trial in alert.trials for block in _trial(trial, shown)]
        yield Section((head, Indented(tuple(_body(alert)), 4), *trials, *rows))


def combined_section(combined: CombinedPolicy) -> Section:
    """Return the combined policy, as a file and as code that can be copied from the first column."""
    said = Labelled((_outcome(combined.outcome, line(combined.in_words), (combined.before, combined.after)),))
    code = (line(""), *_unwrapped("as PyTorch code", combined.code)) if combined.code else ()
    rows = (*_unwrapped("save as a rule file, for --policy", combined.text), *code)
    return Section((said, *rows), combined.title, level=2)


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
    rows += ((line("tried", style="dim"), (line(attempt),)) for attempt in alert.failed)
    if alert.advice:
        untried = " (not tried; --advise tries)" if alert.can_try else ""
        rows.append((line("next", style="dim"), (line(alert.advice, (untried, "dim")),)))
    yield Labelled(tuple(rows))


def _trial(trial: Trial, shown: set[str]) -> Iterator[Block]:
    """Render a change that was tried; what to copy is not wrapped, and a function is shown once."""
    outcome = _outcome(trial.outcome, line(trial.change), (trial.before, trial.after))
    yield Indented((Labelled((outcome,)),), 4)
    functions, _, calls = trial.code.rpartition("\n\n\n")
    code = calls if functions in shown else trial.code
    shown.add(functions)
    for copied in (trial.paste if not trial.diff else "", code):
        yield from (line(f"{'':10}{row}", style="cyan", wrap=False) for row in copied.splitlines())


def _outcome(outcome: Outcome, change: Line, runs: tuple[str, str]) -> tuple[Line, tuple[Block, ...]]:
    """Render what a change does, with its runs."""
    label = line("cure", style="bold green") if outcome == "cure" else line("fix ", style="bold yellow")
    named = zip(("before", "after"), runs, strict=True)
    return label, (change, Labelled(tuple((line(name, style="dim"), (line(text),)) for name, text in named)))


def _unwrapped(title: str, text: str) -> Iterator[Line]:
    yield line(f"# {title}", style="dim", wrap=False)
    yield from (line(row, style="cyan", wrap=False) for row in text.splitlines())


def _place(place: SourceLine) -> tuple[str | tuple[str, str], ...]:
    where = (f"{relative_path(place.file)}:{place.line}", "cyan")
    return (where, f"  {place.code}") if place.code else (where,)


def _diff(diff: str) -> Iterator[Line]:
    """Render a diff unwrapped, so that ``patch`` accepts it."""
    for row in diff.splitlines():
        yield line(f"    {row}", style=_DIFF_STYLES.get(row[:1], "dim"), wrap=False)
