"""The report for people: verdict, what broke, what came near, what was looked at."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ampaudit.core.text import escape_control, short_op
from ampaudit.render.evidence import (
    evidence_text,
    poisons_text,
    ran_on,
    relative_path,
    title_of,
    trial_text,
)
from ampaudit.render.gradient_tables import gradient_tables
from ampaudit.render.grid import hanging
from ampaudit.render.tables import (
    all_sites,
    changed_table,
    nearest_table,
    promoted_table,
    summary,
    unproved_table,
    what_if_table,
)
from ampaudit.render.verdict import verdict_words
from ampaudit.report.finding import Finding, Severity
from ampaudit.report.model import Report

__all__ = ["SEVERITY_STYLES", "finding_text", "print_report", "render"]

_VERDICTS = {"PASS": "bold green", "FAIL": "bold red", "WARN": "bold yellow"}
_FINDINGS = 25  # more are a list that nobody reads
SEVERITY_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "dim"}


def print_report(report: Report, console: Console, *, verbosity: int = 0, nearest: int = 5) -> None:
    """Print to a console; ``verbosity`` -1 is the verdict line alone, 1 adds every site."""
    console.print(render(report, verbosity=verbosity, nearest=nearest), crop=False)


def render(report: Report, *, verbosity: int = 0, nearest: int = 5) -> RenderableType:
    """The report as something that rich can print."""
    if verbosity < 0:
        return _verdict(report)
    parts: list[RenderableType] = [_heading(report), Text(), _verdict(report)]
    active = [f for f in report.findings if f.suppressed is None]
    shown = [f for f in active if verbosity > 0 or f.severity is not Severity.NOTE]
    told = shown if verbosity > 0 else shown[:_FINDINGS]
    diffs: set[str] = set()
    for position, finding in enumerate(told, 1):
        parts += [Text(), finding_text(finding, position), *_diff_lines(finding, diffs)]
    if len(shown) > len(told):
        parts += [Text(), Text(f"and {len(shown) - len(told):,} more findings; -v shows all", "bold")]
    hidden = len(active) - len(shown)
    if report.run.level == "ranges":
        parts += [Text(), *what_if_table(report, nearest)]
    elif report.run.level == "static":
        parts += [Text(), *unproved_table(report, nearest)]
    else:
        promoted = list(promoted_table(report, nearest))
        parts += [Text(), *promoted] if promoted else []
        changed = list(changed_table(report, nearest))
        parts += [Text(), *changed] if changed else []
        near = list(nearest_table(report, nearest))
        parts += [Text(), *near] if near else []
    if report.backward is not None:
        shown_rows = gradient_tables(report.backward, report.run.dtype, nearest, full=verbosity > 0)
        parts += [Text(), *shown_rows]
    parts += [Text(), *summary(report, hidden)]
    if verbosity > 0:
        parts += [Text(), *all_sites(report)]
    return Group(*parts)


def _heading(report: Report) -> Text:
    run = report.run
    what = "FP32 ranges" if run.level == "ranges" else f"policy {run.policy}, {run.dtype}"
    line = f"{escape_control(report.model.source)}: {what}, {run.mode} mode, {ran_on(run)}"
    return Text.assemble(("ampaudit ", "bold"), (report.tool.version, "bold"), "  ", line)


def _verdict(report: Report) -> Text:
    word, sentence = verdict_words(report)
    return Text.assemble((word, _VERDICTS[word]), f"  {sentence}")


def finding_text(finding: Finding, position: int, named: str = "(top module)") -> RenderableType:
    """One finding: where, what, evidence, why, and what to do; ``named`` stands where it has no layer."""
    title = title_of(finding.code, finding.kind)
    lines: list[RenderableType] = [
        Text.assemble(
            f"{position:>2}  ",
            (escape_control(finding.layer or named), "bold"),
            f"  {escape_control(short_op(finding.op))}  " if finding.op else "  ",
            (f"{finding.code} {title}", SEVERITY_STYLES[finding.severity]),
        )
    ]
    body: list[RenderableType] = []
    if finding.source is not None:
        body.append(_source_line(finding.source.file, finding.source.line, finding.source.code))
        if finding.source.caller is not None:
            caller = finding.source.caller
            body.append(
                Text.assemble(("called from ", "dim"), _source_line(caller.file, caller.line, caller.code))
            )
    if seen := evidence_text(finding):
        body.append(Text(seen))
    said: list[tuple[Text, RenderableType]] = [(Text("why", "dim"), Text(escape_control(finding.cause)))]
    if finding.poisons:
        said.append((Text("then", "dim"), Text(poisons_text(finding))))
    body.append(hanging([*said, *_advice(finding)]))
    return Group(*lines, Padding(Group(*body), (0, 0, 0, 4), expand=False))


def _advice(finding: Finding) -> Iterable[tuple[Text, RenderableType]]:
    """What was tried and cures, or fixes this finding alone; where nothing was tried, what may."""
    if not finding.tried:
        can_try = finding.severity is Severity.ERROR and finding.phase != "backward"
        untried = " (not tried; --advise tries)" if can_try else ""
        yield Text("next", "dim"), Text.assemble(escape_control(finding.advice), (untried, "dim"))
    for trial in finding.tried:
        tried = [("before", trial.before), ("after", trial.after)]
        runs = hanging((Text(label, "dim"), Text(escape_control(text))) for label, text in tried)
        label = Text("cure", "bold green") if trial.outcome == "cure" else Text("fix", "bold yellow")
        copied = (
            () if trial.diff else (Text(escape_control(line), "cyan") for line in trial.paste.splitlines())
        )
        yield label, Group(Text(escape_control(trial_text(trial))), *copied, runs)


def _diff_lines(finding: Finding, printed: set[str]) -> Iterable[Text]:
    """The diffs of what was tried, as ``patch`` takes them: each once, indented alike, and never wrapped."""
    for diff in (trial.diff for trial in finding.tried if trial.diff not in printed):
        printed.add(diff)
        for line in diff.splitlines():
            style = {"+": "green", "-": "red"}.get(line[:1], "dim")
            yield Text(f"    {escape_control(line)}", style, no_wrap=True, overflow="ignore")


def _source_line(file: str, line: int, code: str) -> Text:
    return Text.assemble(
        (f"{escape_control(relative_path(file))}:{line}", "cyan"), f"  {escape_control(code)}" if code else ""
    )
