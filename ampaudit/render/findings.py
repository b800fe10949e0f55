"""Findings as values ready to be rendered, and the suites that contain them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ampaudit.core.sites import SourceLine
from ampaudit.core.text import escape_control, escape_lines, listed, plural, short_op
from ampaudit.render.blocks import Block, Indented, Labelled, Line, Section, line
from ampaudit.render.paths import relative_path
from ampaudit.report.finding import (
    KNOWN,
    CombinedPolicy,
    Finding,
    Outcome,
    Severity,
    Source,
    Trial,
    Verdict,
    counts_in_words,
)
from ampaudit.report.pages import title_of

__all__ = ["TOP", "Alert", "Suite", "alert_of", "combined_section", "finding_sections", "safe_line"]

_SEVERITY_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
_DIFF_STYLES = {"+": "green", "-": "red"}
TOP = "(top module)"


@dataclass(frozen=True, slots=True)
class Alert:
    """One message for the user. All its texts are made safe to print; cause and advice may have lines.

    Attributes:
        code: of a check, or the name of a budget.
        title: the page's, in a few words.
        level: how grave.
        fails: whether it fails its suite.
        case: what it is about, among the suite's cases.
        site: the op, or the name of what is not one.
        cause: why.
        advice: what to do next; empty where a change that was tried helps.
        can_try: whether ``--advise`` could try something, and did not.
        layer: the module; something to name it by where there is none.
        op: the ATen op.
        evidence: its numbers in words.
        measure: the number that says how bad it is.
        path: later sites that it poisons.
        trials: changes that cure or fix it.
        failed: changes that were tried where none helps, and what each gave.
        line: where to show it, in the user's own code if possible.
        source: the line that computes the value.
        caller: the user's line that led there.
        fate: what becomes of a value that is not finite.
        suppressed: why it does not count.
        region: first column, last line and the column behind its end, from 1, where they are known.
    """

    code: str
    title: str
    level: Severity
    fails: bool
    case: str
    site: str
    cause: str
    advice: str
    can_try: bool = False
    layer: str = ""
    op: str = ""
    evidence: str = ""
    measure: str = ""
    path: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()
    failed: tuple[str, ...] = ()
    line: SourceLine | None = None
    source: SourceLine | None = None
    caller: SourceLine | None = None
    fate: str = ""
    suppressed: str | None = None
    region: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        """Escape what is not safe to print: names come from anywhere."""
        for name in ("code", "title", "case", "site", "layer", "op", "evidence", "measure", "fate"):
            object.__setattr__(self, name, escape_control(getattr(self, name)))
        for name in ("cause", "advice"):
            object.__setattr__(self, name, escape_lines(getattr(self, name)))
        for name in ("line", "source", "caller"):
            object.__setattr__(self, name, safe_line(getattr(self, name)))
        object.__setattr__(self, "path", tuple(map(escape_control, self.path)))
        object.__setattr__(self, "trials", tuple(map(_safe_trial, self.trials)))
        object.__setattr__(self, "failed", tuple(map(escape_control, self.failed)))
        if self.suppressed is not None:
            object.__setattr__(self, "suppressed", escape_control(self.suppressed))

    @property
    def poisons(self) -> str:
        """The number of poisoned sites, and the first of them; empty if there are none."""
        return f"poisons {plural(len(self.path), 'later site')}: {listed(self.path)}" if self.path else ""

    @property
    def text(self) -> str:
        """Cause, evidence, poisoned sites, and cures or what was tried, each on a line."""
        cures = (f"{trial.outcome}: {trial.change}" for trial in self.trials)
        tried = (f"tried: {attempt}" for attempt in self.failed)
        return "\n".join(part for part in (self.cause, self.evidence, self.poisons, *cures, *tried) if part)

    @property
    def places(self) -> tuple[SourceLine, ...]:
        """Source lines, the one to show first."""
        if self.line is None:
            return ()
        shown = (self.line.file, self.line.line)
        others = (place for place in (self.source, self.caller) if place is not None)
        return self.line, *(place for place in others if (place.file, place.line) != shown)

    @property
    def related(self) -> SourceLine | None:
        """The library line that computes the value, if another line is shown."""
        return self.source if self.source in self.places[1:] else None


@dataclass(frozen=True, slots=True)
class Suite:
    """One audited thing: a model under one policy, a group of training runs, or a set of targets.

    Attributes:
        name: of the model.
        label: how it was audited: ``torch-cuda, float16``.
        verdict: what was found.
        gate: what the exit code makes of it, and by which option: ``fail (--fail-on error)``.
        cases: what was looked at, each to pass or fail by itself: layers, runs or targets.
        alerts: in order of gravity.
        tool_version: of the ampaudit that audited.
        errors: cases that could not be audited, and why.
        tolerates_errors: whether such a case does not fail it, as long as another could be audited.
        seconds: of the audit; per case where that is known.
        inputs: what inputs are called that nobody chose.
        combined: one policy for all errors, if it was asked for.
        gaps: what was not looked at, in words; empty without gaps.
    """

    name: str
    label: str
    verdict: Verdict
    gate: str
    cases: tuple[str, ...]
    alerts: tuple[Alert, ...]
    tool_version: str
    errors: Mapping[str, str] = field(default_factory=dict)
    tolerates_errors: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    inputs: str = ""
    combined: CombinedPolicy | None = None
    gaps: str = ""

    def __post_init__(self) -> None:
        """Escape what is not safe to print."""
        for name in ("name", "label", "gate", "tool_version", "gaps"):
            object.__setattr__(self, name, escape_control(getattr(self, name)))
        object.__setattr__(self, "cases", tuple(map(escape_control, self.cases)))
        errors = {escape_control(case): escape_lines(text) for case, text in self.errors.items()}
        object.__setattr__(self, "errors", errors)
        seconds = {escape_control(case): seconds for case, seconds in self.seconds.items()}
        object.__setattr__(self, "seconds", seconds)
        object.__setattr__(self, "combined", self.combined and _safe_policy(self.combined))

    @property
    def active(self) -> tuple[Alert, ...]:
        """Alerts that are not suppressed."""
        return tuple(alert for alert in self.alerts if alert.suppressed is None)

    @property
    def counts(self) -> str:
        """``2 errors, 1 known finding``: those that count by severity, then those that do not."""
        known = sum(alert.suppressed == KNOWN for alert in self.alerts)
        ignored = len(self.alerts) - len(self.active) - known
        parts = [counts_in_words(alert.level for alert in self.active) or "no findings"]
        parts += [plural(known, "known finding")] if known else []
        parts += [f"{ignored} ignored"] if ignored else []
        return ", ".join(parts)


def alert_of(
    finding: Finding, case: str, rank: float, unnamed: str = TOP, *, call: str = "", advised: bool = False
) -> Alert:
    """Return a finding as an alert.

    Args:
        finding: any.
        case: what it is about, among the suite's cases.
        rank: of the severity from which it fails.
        unnamed: stands for its layer where it has none.
        call: which call of its op on its line it is about; empty where there is one.
        advised: whether changes were tried for the findings of its report.
    """
    source = finding.source
    return Alert(
        code=finding.code,
        title=title_of(finding.code, finding.kind),
        level=finding.severity,
        fails=finding.severity.rank >= rank and finding.suppressed is None,
        case=case,
        site=finding.site,
        cause=escape_control(finding.cause),
        advice="" if finding.helpful else escape_control(finding.advice),
        can_try=not advised and finding.severity is Severity.ERROR and finding.phase != "backward",
        layer=finding.layer or unnamed,
        op=short_op(finding.op),
        evidence="; ".join(part for part in (call, finding.numbers) if part),
        measure=finding.key_number,
        path=finding.poisons,
        trials=tuple(replace(trial, change=trial.in_words) for trial in finding.helpful),
        failed=tuple(f"{trial.change}: {trial.after}" for trial in finding.tried if finding.unhelped),
        line=safe_line(source.evident if source is not None else None),
        source=safe_line(source),
        caller=source.caller if source is not None else None,
        fate=finding.fate or "",
        suppressed=finding.suppressed,
    )


def safe_line(line: SourceLine | Source | None) -> SourceLine | None:
    """Return a source line that is safe to print."""
    return (
        None if line is None else SourceLine(escape_control(line.file), line.line, escape_control(line.code))
    )


def _safe_trial(trial: Trial) -> Trial:
    return replace(
        trial,
        change=escape_control(trial.change),
        paste=escape_lines(trial.paste),
        diff=escape_lines(trial.diff),
        code=escape_lines(trial.code),
        before=escape_control(trial.before),
        after=escape_control(trial.after),
    )


def _safe_policy(combined: CombinedPolicy) -> CombinedPolicy:
    return replace(
        combined,
        change=escape_control(combined.change),
        text=escape_lines(combined.text),
        code=escape_lines(combined.code),
        before=escape_control(combined.before),
        after=escape_control(combined.after),
        left=tuple(map(escape_control, combined.left)),
    )


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
