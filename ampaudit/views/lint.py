"""Renders lint findings: location, cause, source line, advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ampaudit.core.sites import SourceLine
from ampaudit.core.text import escape_control, plural
from ampaudit.findings.finding import threshold
from ampaudit.findings.pages import title_of
from ampaudit.render.blocks import Line, Section, line
from ampaudit.render.findings import Alert, Suite
from ampaudit.render.view import Row, View
from ampaudit.report.lint import LintFinding, LintReport
from ampaudit.views.verdict import verdict_section

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_WIDEST = 100


class LintView(View[LintReport]):
    """A suite with a case per file that has findings; a row per finding."""

    columns = (
        *("file", "cell", "line", "column", "code", "severity", "function", "cause", "advice"),
        *("suppressed", "fixable", "fixable_unsafely"),
    )

    def sections(self, verbosity: int = 0) -> Iterator[Section]:
        """Render the findings and a summary; the summary alone if ``verbosity`` is -1."""
        report = self.document
        if verbosity >= 0:
            findings = report.findings if verbosity > 0 else report.active
            yield from (Section(tuple(_finding(finding))) for finding in findings)
        unread = (line(str(item), style="yellow", wrap=False) for item in report.unread)
        yield verdict_section(report.verdict, _summary(report), self.gate, before=unread, wrap=False)

    def suites(self) -> tuple[Suite, ...]:
        """Return all files as one suite."""
        report = self.document
        rank = threshold(report.fail_on)
        suite = Suite(
            name=self.name,
            label="",
            extent=plural(report.linted, "file"),
            verdict=report.verdict,
            gate=self.gate,
            cases=tuple(dict.fromkeys(escape_control(finding.file) for finding in report.findings)),
            alerts=tuple(_alert(finding, rank) for finding in report.findings),
            tool_version=report.tool_version,
            tolerates_errors=report.unreadable < report.linted,
            errors={f"{u.file}:{u.line}": escape_control(u.reason) for u in report.unread},
        )
        return (suite,)

    def rows(self) -> Iterator[Row]:
        """Return a row per finding."""
        for finding in self.document.findings:
            cells = {name: getattr(finding, name) for name in self.columns}
            yield {**cells, **{name: int(cells[name]) for name in self.columns if name.startswith("fixable")}}


def _finding(finding: LintFinding) -> Iterator[Line]:
    """Render a finding with its source line, unwrapped for editors and scripts."""
    cell = f"cell {finding.cell}:" if finding.cell is not None else ""
    hidden = f" [suppressed: {finding.suppressed}]" if finding.suppressed is not None else ""
    yield line(
        f"{finding.file}:{cell}{finding.line}:{finding.column}: ",
        (f"{finding.severity} {finding.code}", _STYLES[finding.severity]),
        f" {finding.cause}",
        (hidden, "dim"),
        wrap=False,
    )
    excerpt, indent, width = _excerpt(finding)
    yield line(f"{finding.line:>5} | {excerpt}", wrap=False)
    if indent <= _WIDEST:
        yield line(f"{'':>5} | {' ' * max(indent, 0)}{'^' * width}", style="red", wrap=False)
    how = "fixable with --fix" + (" --unsafe-fixes" if finding.fixable_unsafely else "")
    fix = f"  ({how})" if finding.fixable or finding.fixable_unsafely else ""
    yield line(f"{'':>5} = {finding.advice}{fix}", wrap=False)


def _excerpt(finding: LintFinding) -> tuple[str, int, int]:
    """Return the unindented source line, and the column and width of the finding in it."""
    text = escape_control(finding.source.expandtabs(4))
    # tabs and escaped characters make the text before the finding wider
    before = len(escape_control(finding.source[: finding.column - 1].expandtabs(4)))
    last = finding.end_column - 1 if finding.end_line == finding.line else len(finding.source.rstrip())
    width = max(len(escape_control(finding.source[:last].expandtabs(4))) - before, 1)
    indent = before - (len(text) - len(text.lstrip()))
    excerpt = text.strip()
    if len(excerpt) > _WIDEST:
        return excerpt[:_WIDEST] + "…", indent, min(width, max(_WIDEST - indent, 1))
    return excerpt, indent, width


def _summary(report: LintReport) -> str:
    read = report.linted - report.unreadable
    if not report.linted:
        text = "no Python, notebook or Markdown file found"
    elif not read:
        text = "nothing could be read"
    else:
        levels = Counter(str(finding.severity) for finding in report.active)
        parts = [plural(levels[level], level) for level in _STYLES if levels[level]]
        text = f"{', '.join(parts) or 'no findings'} in {plural(read, 'file')}"
    counts = {
        "fixable with --fix": sum(finding.fixable for finding in report.active),
        "with --unsafe-fixes": sum(finding.fixable_unsafely for finding in report.active),
        "fixed": report.fixed,
        "suppressed": len(report.findings) - len(report.active),
    }
    text += "".join(f"; {count} {what}" for what, count in counts.items() if count)
    return text + (f"; {plural(len(report.unread), 'read error')}" if report.unread else "")


def _alert(finding: LintFinding, rank: float) -> Alert:
    cell = f"cell {finding.cell}, " if finding.cell is not None else ""
    return Alert(
        code=finding.code,
        title=title_of(finding.code, finding.code),
        level=finding.severity,
        fails=finding.suppressed is None and finding.severity.rank >= rank,
        case=finding.file,
        site=cell + (finding.function or "(module)"),
        cause=escape_control(finding.cause),
        advice=escape_control(finding.advice),
        line=SourceLine(finding.file, finding.file_line or finding.line, finding.source.strip()),
        suppressed=finding.suppressed,
        # columns of a cell are not those of its notebook's file
        region=None if finding.cell else (finding.column, finding.end_line, finding.end_column),
    )
