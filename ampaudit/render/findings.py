"""Defines findings that are ready to be rendered, and the suites that contain them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

from ampaudit.core.sites import SourceLine
from ampaudit.core.text import escape_control, escape_lines, forward_slashes, listed, plural, short_op
from ampaudit.findings.finding import (
    INSTALLED,
    KNOWN,
    CombinedPolicy,
    Finding,
    Outcome,
    Severity,
    Trial,
    Verdict,
    counts_in_words,
)
from ampaudit.findings.pages import title_of
from ampaudit.render.blocks import Block, Indented, Labelled, Line, Section, line

Change = TypeVar("Change", Trial, CombinedPolicy)
MARKS = {"pass": "✅ PASS", "fail": "❌ FAIL", "warn": "⚠ WARN"}
_SEVERITY_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}
_DIFF_STYLES = {"+": "green", "-": "red"}
TOP = "(top module)"


@dataclass(frozen=True, slots=True)
class Alert:
    """One message for the user, with all texts escaped; cause and advice may have several lines.

    Attributes:
        code: Code of the check, or name of the budget.
        title: Title of the check's page.
        level: Severity.
        fails: Whether it fails its suite.
        case: The suite's case that it belongs to.
        site: Name of the op, output or parameter.
        cause: Explanation of the problem.
        advice: Next step; empty if a tried change helps.
        can_try: Whether ``--advise`` was off and could try changes.
        layer: Module path, or a placeholder.
        op: Short name of the ATen op.
        evidence: Measurements in words.
        measure: The single most telling measurement.
        path: Sites that it poisons, later in the pass.
        backward: Whether it is about gradients.
        trials: Tried changes that cure or fix it.
        failed: Tried changes and their results, if none of them helps.
        line: Source line to show, in the user's own code if possible.
        source: Source line that computes the value.
        caller: Line of the user's code that calls it.
        fate: What becomes of a value that is not finite.
        suppressed: Reason why it does not count; ``None`` if it counts.
        region: First column, last line, and column after the end (from 1); ``None`` if unknown.
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
    backward: bool = False
    trials: tuple[Trial, ...] = ()
    failed: tuple[str, ...] = ()
    line: SourceLine | None = None
    source: SourceLine | None = None
    caller: SourceLine | None = None
    fate: str = ""
    suppressed: str | None = None
    region: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        """Escape control characters: names are untrusted."""
        for name in ("code", "title", "case", "site", "layer", "op", "evidence", "measure", "fate"):
            object.__setattr__(self, name, escape_control(getattr(self, name)))
        for name in ("cause", "advice"):
            object.__setattr__(self, name, escape_lines(getattr(self, name)))
        for name in ("line", "source", "caller"):
            place: SourceLine | None = getattr(self, name)
            safe = place and SourceLine(escape_control(place.file), place.line, escape_control(place.code))
            object.__setattr__(self, name, safe)
        object.__setattr__(self, "path", tuple(map(escape_control, self.path)))
        trials = tuple(_safe_change(trial, "paste", "diff") for trial in self.trials)
        object.__setattr__(self, "trials", trials)
        object.__setattr__(self, "failed", tuple(map(escape_control, self.failed)))
        if self.suppressed is not None:
            object.__setattr__(self, "suppressed", escape_control(self.suppressed))

    @property
    def poisons(self) -> str:
        """The number of poisoned sites and the first few; empty without any."""
        count = len(self.path)
        sites = f"gradients of {plural(count, 'more site')}" if self.backward else plural(count, "later site")
        return f"poisons {sites}: {listed(self.path)}" if self.path else ""

    @property
    def text(self) -> str:
        """Cause, evidence, poisoned sites, and cures or failed attempts, one per line."""
        cures = (f"{trial.outcome}: {trial.change}" for trial in self.trials)
        tried = (f"tried: {attempt}" for attempt in self.failed)
        return "\n".join(part for part in (self.cause, self.evidence, self.poisons, *cures, *tried) if part)

    @property
    def places(self) -> tuple[SourceLine, ...]:
        """Distinct source lines, the most relevant first."""
        if self.line is None:
            return ()
        first = (self.line.file, self.line.line)
        others = (place for place in (self.source, self.caller) if place is not None)
        return self.line, *(place for place in others if (place.file, place.line) != first)

    @property
    def related(self) -> SourceLine | None:
        """The line that computes the value, if ``line`` is another one."""
        return self.source if self.source in self.places[1:] else None


@dataclass(frozen=True, slots=True)
class Suite:
    """The findings of one audit: a model under one policy, a group of training runs, or a set of targets.

    Attributes:
        name: Name of the model.
        label: Policy and format, such as ``torch-cuda, float16``; empty for a set of targets. With the name,
            it identifies the suite from run to run.
        verdict: Verdict on all findings.
        gate: Gate and the option that sets it, such as ``fail (--fail-on error)``.
        cases: Layers, runs or targets, each of which passes or fails.
        alerts: Findings, gravest first.
        tool_version: Version of ampaudit that made the report.
        errors: Reasons by case that could not be audited.
        tolerates_errors: Whether errors are warnings, since other cases were audited.
        seconds: Wall time by case, or of the whole audit under an empty name.
        inputs: Description of random or built-in inputs; empty for inputs of the user.
        combined: Policy that addresses all errors; ``None`` without one.
        gaps: Description of what was not audited; empty without gaps.
        extent: Number of targets or files in a set of them.
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
    extent: str = ""

    def __post_init__(self) -> None:
        for name in ("name", "label", "extent", "gate", "tool_version", "gaps"):
            object.__setattr__(self, name, escape_control(getattr(self, name)))
        object.__setattr__(self, "cases", tuple(map(escape_control, self.cases)))
        errors = {escape_control(case): escape_lines(text) for case, text in self.errors.items()}
        object.__setattr__(self, "errors", errors)
        seconds = {escape_control(case): seconds for case, seconds in self.seconds.items()}
        object.__setattr__(self, "seconds", seconds)
        if self.combined is not None:
            remaining = tuple(map(escape_control, self.combined.left))
            object.__setattr__(self, "combined", replace(_safe_change(self.combined, "text"), left=remaining))

    @property
    def title(self) -> str:
        """Name and label."""
        return f"{self.name} ({self.label})" if self.label else self.name

    @property
    def active(self) -> tuple[Alert, ...]:
        """Alerts that are not suppressed."""
        return tuple(alert for alert in self.alerts if alert.suppressed is None)

    @property
    def counts(self) -> str:
        """Findings that count by severity, then others: ``2 errors, 1 known finding, 1 not checked``."""
        baselined = sum(alert.suppressed == KNOWN for alert in self.alerts)
        ignored = len(self.alerts) - len(self.active) - baselined
        parts = [counts_in_words(alert.level for alert in self.active) or "no findings"]
        parts += [plural(baselined, "known finding")] if baselined else []
        parts += [f"{ignored} ignored"] if ignored else []
        parts += [f"{len(self.errors)} not checked"] if self.errors else []
        return ", ".join(parts)


def alert_of(
    finding: Finding, case: str, rank: float, unnamed: str = TOP, *, call: str = "", advised: bool = False
) -> Alert:
    """Return a finding as an alert.

    Args:
        finding: Finding of a scan or of a training run.
        case: The suite's case that it belongs to.
        rank: Lowest rank of a severity that fails.
        unnamed: Name of the layer if the finding has none.
        call: Which call of the op on its line it is about; empty if there is only one.
        advised: Whether changes were tried for the report's findings, or cannot be tried.
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
        backward=finding.phase == "backward",
        trials=tuple(replace(trial, change=trial.in_words) for trial in finding.helpful),
        failed=tuple(
            f"{trial.change}: {trial.after}" for trial in finding.tried if finding.all_trials_failed
        ),
        line=source.user_line if source is not None else None,
        source=SourceLine(source.file, source.line, source.code) if source is not None else None,
        caller=source.caller if source is not None else None,
        fate=finding.fate or "",
        suppressed=finding.suppressed,
    )


def _safe_change(change: Change, *multiline: str) -> Change:
    """Escape the texts of a change; its code, and the fields in ``multiline``, keep their line breaks."""
    safe: dict[str, Any] = {name: escape_lines(getattr(change, name)) for name in (*multiline, "code")}
    safe |= {name: escape_control(getattr(change, name)) for name in ("change", "before", "after")}
    return replace(change, **safe)


def finding_sections(alerts: Iterable[Alert]) -> Iterator[Section]:
    """Render a numbered section per finding; repeated diffs and helper functions are shown once."""
    printed: set[str] = set()
    for number, alert in enumerate(alerts, 1):
        head = line(
            f"{number:>2}  ",
            (f"{alert.level.value}  ", _SEVERITY_STYLES[alert.level]),
            (alert.layer, "bold"),
            f"  {alert.op}  " if alert.op else "  ",
            (f"{alert.code} {alert.title}", _SEVERITY_STYLES[alert.level]),
        )
        diffs = dict.fromkeys(t.diff for t in alert.trials if t.diff not in printed)
        printed |= diffs.keys()
        rows = [row for diff in diffs for row in diff.splitlines()]  # unwrapped, so that patch accepts them
        diff_lines = (line(f"    {r}", style=_DIFF_STYLES.get(r[:1], "dim"), wrap=False) for r in rows)
        trials = [block for trial in alert.trials for block in _trial(trial, printed)]
        yield Section((head, Indented(tuple(_body(alert)), 4), *trials, *diff_lines))


def combined_section(combined: CombinedPolicy) -> Section:
    """Render the combined policy as a rule file and as code, both unindented so that they can be copied."""
    outcome = Labelled(
        (_outcome(combined.outcome, line(combined.in_words), (combined.before, combined.after)),)
    )
    code = (line(""), *_unwrapped("as PyTorch code", combined.code)) if combined.code else ()
    rows = (*_unwrapped("save as a rule file, for --policy", combined.text), *code)
    return Section((outcome, *rows), combined.title, level=2)


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
        untried = " (--advise tests it)" if alert.can_try else ""
        rows.append((line("next", style="dim"), (line(alert.advice, (untried, "dim")),)))
    yield Labelled(tuple(rows))


def _trial(trial: Trial, printed: set[str]) -> Iterator[Block]:
    """Render a tried change; code to copy is not wrapped, and a function is printed once."""
    outcome = _outcome(trial.outcome, line(trial.change), (trial.before, trial.after))
    yield Indented((Labelled((outcome,)),), 4)
    functions, _, calls = trial.code.rpartition("\n\n\n")
    code = calls if functions in printed else trial.code
    printed.add(functions)
    for copied in (trial.paste if not trial.diff else "", code):
        yield from (line(f"{'':10}{row}", style="cyan", wrap=False) for row in copied.splitlines())


def _outcome(outcome: Outcome, change: Line, runs: tuple[str, str]) -> tuple[Line, tuple[Block, ...]]:
    """Render the effect of a change, and the results before and after it."""
    label = line("cure", style="bold green") if outcome == "cure" else line("fix ", style="bold yellow")
    labelled = zip(("before", "after"), runs, strict=True)
    return label, (
        change,
        Labelled(tuple((line(name, style="dim"), (line(text),)) for name, text in labelled)),
    )


def _unwrapped(title: str, text: str) -> Iterator[Line]:
    yield line(f"# {title}", style="dim", wrap=False)
    yield from (line(row, style="cyan", wrap=False) for row in text.splitlines())


def _place(place: SourceLine) -> tuple[str | tuple[str, str], ...]:
    where = (f"{relative_path(place.file)}:{place.line}", "cyan")
    return (where, f"  {place.code}") if place.code else (where,)


def relative_path(file: str) -> str:
    """Return the path relative to ``site-packages`` or the working directory, else unchanged."""
    return _relative_to(file, os.getcwd())


@cache
def _relative_to(file: str, directory: str) -> str:
    file = forward_slashes(file)
    _, packages, inside = file.rpartition(INSTALLED)
    if packages:
        return inside
    try:
        relative = forward_slashes(os.path.relpath(file, directory))
    except ValueError:  # an empty name, or another drive
        return file
    return file if relative.startswith("..") else relative
