"""Renders lint findings as text: location, cause, source line, advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from ampaudit.core.text import escape_control
from ampaudit.report.lint import LintFinding, LintReport

__all__ = ["render_lint"]

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
_WIDEST = 100


def render_lint(report: LintReport, *, verbosity: int = 0) -> RenderableType:
    """Render the findings and a summary; the summary alone if ``verbosity`` is -1."""
    parts: list[RenderableType] = []
    if verbosity >= 0:
        for finding in report.findings:
            if finding.suppressed is None or verbosity > 0:
                parts += _finding(finding)
    for item in report.unread:
        parts.append(Text(str(item), "yellow"))
    return Group(*parts, _summary(report))


def _finding(finding: LintFinding) -> Iterator[RenderableType]:
    cell = f"cell {finding.cell}:" if finding.cell is not None else ""
    # not wrapped: editors and scripts read one line per finding
    head = Text(
        f"{escape_control(finding.file)}:{cell}{finding.line}:{finding.column}: ",
        no_wrap=True,
        overflow="ignore",
    )
    head += Text(f"{finding.severity} {finding.code}", _STYLES[finding.severity])
    head += Text(f" {escape_control(finding.cause)}")
    if finding.suppressed is not None:
        head += Text(f" [suppressed: {escape_control(finding.suppressed)}]", "dim")
    yield head
    line = escape_control(finding.source.expandtabs(4))
    # tabs and escaped characters make the text before the finding wider
    before = len(escape_control(finding.source[: finding.column - 1].expandtabs(4)))
    last = finding.end_column - 1 if finding.end_line == finding.line else len(finding.source.rstrip())
    width = max(len(escape_control(finding.source[:last].expandtabs(4))) - before, 1)
    indent = len(line) - len(line.lstrip())
    shown = line.strip()
    if len(shown) > _WIDEST:
        shown, width = shown[:_WIDEST] + "…", min(width, max(_WIDEST - before + indent, 1))
    gutter = f"{finding.line:>5} | "
    yield Text(f"{gutter}{shown}", no_wrap=True, overflow="ignore")
    if before - indent <= _WIDEST:
        yield Text(
            f"{'':>5} | {' ' * max(before - indent, 0)}{'^' * width}", "red", no_wrap=True, overflow="ignore"
        )
    fix = "  (fixable with --fix)" if finding.fixable else ""
    yield Text(f"{'':>5} = {escape_control(finding.advice)}{fix}", no_wrap=True, overflow="ignore")
    yield Text()


def _summary(report: LintReport) -> Text:
    counted = [finding for finding in report.findings if finding.suppressed is None]
    levels = Counter(str(finding.severity) for finding in counted)
    parts = [_many(levels[level], level) for level in _STYLES if levels[level]]
    files = _many(report.linted, "file")
    said = f"{', '.join(parts)} in {files}" if parts else f"no findings in {files}"
    if not report.linted:
        said = "no Python, notebook or Markdown file found"
    fixable = sum(finding.fixable for finding in counted)
    if fixable:
        said += f"; {fixable} fixable with --fix"
    if report.fixed:
        said += f"; {report.fixed} fixed"
    hidden = len(report.findings) - len(counted)
    if hidden:
        said += f"; {hidden} suppressed"
    if report.unread:
        said += f"; {_many(len(report.unread), 'read error')}"
    verdict = Text("FAIL  ", "bold red") if report.exit_code else Text("PASS  ", "bold green")
    return verdict + Text(said)


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'s' if count != 1 else ''}"
