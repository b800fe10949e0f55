"""What every machine-readable format is made from: audited subjects, and the alerts about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ampaudit.core.errors import UsageError
from ampaudit.core.sites import SourceLine
from ampaudit.core.text import escape_control
from ampaudit.render.evidence import evidence_text, evident_line, poisons_text, title_of, trial_text
from ampaudit.report.check import CheckResults, TargetResult
from ampaudit.report.comparison import Comparison
from ampaudit.report.documents import Document
from ampaudit.report.finding import Finding, Severity, threshold
from ampaudit.report.lint import LintFinding, LintReport
from ampaudit.report.model import Report
from ampaudit.report.training import TrainingReport

__all__ = ["Alert", "Subject", "subjects_of"]


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing to tell somebody. Every text in it is safe to print: names have no control characters.

    Attributes:
        code: of a check, or the name of a budget.
        title: the page's, in a few words.
        level: how grave.
        fails: whether it fails its subject.
        case: what it is about, among the subject's cases.
        site: the op, or the name of what is not one.
        text: evidence and cause, each on a line.
        advice: what to do next.
        line: where to show it, in the user's own code if possible.
        related: the line inside a library that computes the value.
        path: later sites that it poisons.
        suppressed: why it does not count.
        region: first column, last line and the column behind its end, from 1, where they are known.
        diffs: changes of the source that cure it.
    """

    code: str
    title: str
    level: Severity
    fails: bool
    case: str
    site: str
    text: str
    advice: str
    line: SourceLine | None = None
    related: SourceLine | None = None
    path: tuple[str, ...] = ()
    suppressed: str | None = None
    region: tuple[int, int, int] | None = None
    diffs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Subject:
    """One audited thing: a model under one policy, one training run beside others, or a set of targets.

    Attributes:
        name: of the model.
        label: how it was audited: ``torch-cuda, float16``.
        passed: its verdict.
        cases: what was looked at, each to pass or fail by itself: layers, runs or targets.
        alerts: in order of gravity.
        errors: cases that could not be audited, and why.
        seconds: of the audit; per case where that is known.
        tool_version: of the ampaudit that audited.
    """

    name: str
    label: str
    passed: bool
    cases: tuple[str, ...]
    alerts: tuple[Alert, ...]
    errors: dict[str, str]
    seconds: dict[str, float]
    tool_version: str


def subjects_of(document: Document) -> tuple[Subject, ...]:
    """What a report is about, one or several.

    Raises:
        UsageError: a plan, a conversion or a verification has no findings.
    """
    if isinstance(document, Report):
        return (_of_report(document),)
    if isinstance(document, Comparison):
        return tuple(map(_of_report, document.reports))
    if isinstance(document, TrainingReport):
        return (_of_training(document),)
    if isinstance(document, CheckResults):
        return (_of_check(document),)
    if isinstance(document, LintReport):
        return (_of_lint(document),)
    raise UsageError("this report has no findings", hint="use --format text or json, or scan the model")


def _of_report(report: Report) -> Subject:
    rank = threshold(report.fail_on)
    layers = dict.fromkeys(_case(s.layer) for s in report.sites if s.forward is not None)
    layers |= dict.fromkeys(_case(f.layer) for f in report.findings)
    return Subject(
        name=escape_control(report.model.source),
        label=f"{escape_control(report.run.policy)}, {report.run.dtype}",
        passed=report.exit_code == 0,
        cases=tuple(layers),
        alerts=tuple(_alert(f, _case(f.layer), rank) for f in report.findings),
        errors={},
        seconds={"": sum(report.timings.values())} if report.timings else {},
        tool_version=report.tool.version,
    )


def _of_training(report: TrainingReport) -> Subject:
    failing = 3.0 if report.verdict == "fail" else float("inf")
    return Subject(
        name=escape_control(report.model.source),
        label=f"training, {report.dtype}",
        passed=report.exit_code == 0,
        cases=tuple(escape_control(variant.name) for variant in report.variants),
        alerts=tuple(_alert(f, escape_control(f.site.rpartition("/")[0]), failing) for f in report.findings),
        errors={},
        seconds={},
        tool_version=report.tool.version,
    )


def _of_check(check: CheckResults) -> Subject:
    from ampaudit.core.version import __version__

    return Subject(
        name="ampaudit check",
        label=f"{len(check.targets)} target{'s' if len(check.targets) != 1 else ''}",
        passed=check.exit_code == 0,
        cases=tuple(escape_control(target.target) for target in check.targets),
        alerts=tuple(alert for target in check.targets for alert in _of_target(target)),
        errors={escape_control(t.target): t.error for t in check.targets if t.error},
        seconds={escape_control(target.target): target.seconds for target in check.targets},
        tool_version=__version__,
    )


def _of_target(target: TargetResult) -> Iterable[Alert]:
    for breach in target.breaches:
        line = evident_line(breach.source)
        yield Alert(
            code=breach.budget,
            title=title_of(breach.budget, breach.budget),
            level=breach.severity,
            fails=True,
            case=escape_control(target.target),
            site=escape_control(breach.where),
            text=escape_control(breach.what),
            advice=f"ampaudit scan {escape_control(target.target)} says more",
            line=_safe(line or SourceLine(target.target.partition(":")[0], 1)),
        )


def _of_lint(report: LintReport) -> Subject:
    rank = threshold(report.fail_on)
    files = dict.fromkeys(escape_control(finding.file) for finding in report.findings)
    return Subject(
        name="ampaudit lint",
        label=f"{report.linted} file{'s' if report.linted != 1 else ''}",
        passed=report.exit_code == 0,
        cases=tuple(files),
        alerts=tuple(_of_line(finding, rank) for finding in report.findings),
        errors={
            f"{escape_control(item.file)}:{item.line}": escape_control(item.reason) for item in report.unread
        },
        seconds={},
        tool_version=report.tool_version,
    )


def _of_line(finding: LintFinding, rank: float) -> Alert:
    cell = f"cell {finding.cell}, " if finding.cell is not None else ""
    return Alert(
        code=finding.code,
        title=title_of(finding.code, finding.code),
        level=finding.severity,
        fails=finding.suppressed is None and finding.severity.rank >= rank,
        case=escape_control(finding.file),
        site=cell + (escape_control(finding.function) or "(module)"),
        text=escape_control(finding.cause),
        advice=escape_control(finding.advice),
        line=_safe(SourceLine(finding.file, finding.line, finding.source.strip())),
        suppressed=finding.suppressed,
        region=(finding.column, finding.end_line, finding.end_column),
    )


def _alert(finding: Finding, case: str, rank: float) -> Alert:
    line = evident_line(finding.source)
    computed = finding.source
    inside = (
        computed is not None and line is not None and (computed.file, computed.line) != (line.file, line.line)
    )
    evidence, poisons = evidence_text(finding), poisons_text(finding) if finding.poisons else ""
    cures = [f"{t.outcome}: {escape_control(trial_text(t))}" for t in finding.tried]
    lines = [escape_control(finding.cause), evidence, poisons, *cures]
    return Alert(
        code=finding.code,
        title=title_of(finding.code, finding.kind),
        level=finding.severity,
        fails=finding.severity.rank >= rank and finding.suppressed is None,
        case=case,
        site=escape_control(finding.site),
        text="\n".join(line for line in lines if line),
        advice="" if finding.tried else escape_control(finding.advice),
        line=_safe(line),
        related=_safe(SourceLine(computed.file, computed.line, computed.code))
        if inside and computed
        else None,
        path=tuple(map(escape_control, finding.poisons)),
        suppressed=finding.suppressed,
        diffs=tuple("\n".join(map(escape_control, t.diff.splitlines())) for t in finding.tried if t.diff),
    )


def _safe(line: SourceLine | None) -> SourceLine | None:
    return (
        None if line is None else SourceLine(escape_control(line.file), line.line, escape_control(line.code))
    )


def _case(layer: str) -> str:
    return escape_control(layer or "(top module)")
