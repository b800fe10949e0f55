"""Findings as reports show them: with their lines, functions and severities, and what comments hide."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from ampaudit.core.comments import Comment, comments_of
from ampaudit.lint.code_blocks import Unit
from ampaudit.lint.diagnostic import Diagnostic
from ampaudit.lint.flow.script import parse
from ampaudit.lint.selection import UNUSED, RuleSelection
from ampaudit.lint.source_text import character_column, split_lines
from ampaudit.report.finding import Severity
from ampaudit.report.lint import LintFinding
from ampaudit.report.pages import all_pages
from ampaudit.report.pages.page import LINTED

__all__ = ["Hidden", "findings_of"]


class Hidden:
    """The comments of a text, and which of them hid something."""

    def __init__(self, comments: Sequence[Comment]) -> None:
        self.comments = comments
        self.used: set[int] = set()

    def by(self, item: Diagnostic) -> Comment | None:
        """The comment that hides a finding: on its first line, or its last."""
        lines = (getattr(item.node, "lineno", 1), getattr(item.node, "end_lineno", 1))
        for comment in self.comments:
            if comment.line in lines and (not comment.codes or item.code in comment.codes):
                self.used.add(comment.line)
                return comment
        return None


def findings_of(
    path: str, unit: Unit, found: list[Diagnostic], selection: RuleSelection
) -> list[LintFinding]:
    """What is reported of a unit: what is asked for, what comments hide, and comments that hide nothing."""
    lines = split_lines(unit.text)
    hidden = Hidden(comments_of(unit.text))
    functions = _Functions(unit.text) if found else None
    results = []
    for item in found:
        comment = hidden.by(item)
        if selection.wants(item.code) and functions is not None:
            made = _finding(path, unit, lines, item, functions.around(getattr(item.node, "lineno", 1)))
            because = f"comment: {comment.reason}" if comment is not None else None
            results.append(made if because is None else replace(made, suppressed=because))
    for comment in hidden.comments:
        ours = comment.codes and all(code.startswith(LINTED) for code in comment.codes)
        if ours and comment.line not in hidden.used and selection.wants(UNUSED):
            results.append(_unused(path, unit, comment))
    return results


def _unused(path: str, unit: Unit, comment: Comment) -> LintFinding:
    line, cell = unit.place(comment.line)
    cause = f"this suppression of {', '.join(comment.codes)} hides nothing"
    severity = Severity(all_pages()[UNUSED].severity)
    return LintFinding(
        UNUSED, severity, path, line, 1, line, 1, cell, "", cause, "remove it", False, comment.code
    )


def _finding(path: str, unit: Unit, lines: list[str], item: Diagnostic, function: str) -> LintFinding:
    node = item.node
    first = int(getattr(node, "lineno", 1))
    last = int(getattr(node, "end_lineno", first) or first)
    text, end_text = lines[first - 1], lines[last - 1]
    column = character_column(text, getattr(node, "col_offset", 0))
    end = character_column(end_text, getattr(node, "end_col_offset", 0) or 0)
    line, cell = unit.place(first)
    return LintFinding(
        code=item.code,
        severity=Severity(all_pages()[item.code].severity),
        file=path,
        line=line,
        column=column + unit.indent + 1,
        end_line=unit.place(last)[0],
        end_column=end + unit.indent + 1,
        cell=cell,
        function=function,
        cause=item.cause,
        advice=item.advice,
        fixable=item.fix is not None,
        source=text.strip("\r"),
    )


class _Functions:
    """Names of functions and classes by the lines they cover."""

    def __init__(self, text: str) -> None:
        self.spans: list[tuple[int, int, str]] = []
        self._add(parse(text).body, "")

    def _add(self, body: Sequence[ast.stmt], outer: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}.{node.name}" if outer else node.name
                self.spans.append((node.lineno, node.end_lineno or node.lineno, name))
                self._add(node.body, name)

    def around(self, line: int) -> str:
        """The innermost one that a line is in."""
        inside = [span for span in self.spans if span[0] <= line <= span[1]]
        return min(inside, key=lambda span: span[1] - span[0])[2] if inside else ""
