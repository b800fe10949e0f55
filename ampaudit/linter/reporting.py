"""Turns diagnostics into findings of the report, and applies suppression comments."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from ampaudit.core.comments import Comment, comments_of
from ampaudit.linter.code_blocks import CodeBlock
from ampaudit.linter.diagnostic import Applicability, Certainty, Diagnostic, Fix
from ampaudit.linter.fix_safety import applicability, needed_torch
from ampaudit.linter.flow.script import parse
from ampaudit.linter.selection import UNUSED_SUPPRESSION, RuleSelection
from ampaudit.linter.source_text import character_column, split_lines
from ampaudit.report.finding import Severity
from ampaudit.report.lint import LintFinding
from ampaudit.report.pages import all_pages
from ampaudit.report.pages.page import LINTED

__all__ = ["Suppressions", "severity_of", "to_findings"]


class Suppressions:
    """The suppression comments of a text, and which of them were used."""

    def __init__(self, text: str) -> None:
        self.comments = comments_of(text)
        self._used: set[int] = set()

    def matching(self, diagnostic: Diagnostic) -> Comment | None:
        """Return the comment on the first or last line of a diagnostic that suppresses it."""
        lines = (getattr(diagnostic.node, "lineno", 1), getattr(diagnostic.node, "end_lineno", 1))
        for comment in self.comments:
            if comment.line in lines and (not comment.codes or diagnostic.code in comment.codes):
                self._used.add(comment.line)
                return comment
        return None

    def unused(self) -> list[Comment]:
        """Return the comments on lint rules that have matched nothing so far."""
        return [
            comment
            for comment in self.comments
            if comment.codes
            and all(code.startswith(LINTED) for code in comment.codes)
            and comment.line not in self._used
        ]


def to_findings(
    path: str, block: CodeBlock, diagnostics: list[Diagnostic], selection: RuleSelection
) -> list[LintFinding]:
    """Return the findings of the enabled rules, with suppressions and unused suppression comments."""
    lines = split_lines(block.text)
    suppressions = Suppressions(block.text)
    definitions = _Definitions(block.text) if diagnostics else None
    findings = []
    for diagnostic in diagnostics:
        comment = suppressions.matching(diagnostic)
        if selection.includes(diagnostic.code, severity_of(diagnostic)) and definitions is not None:
            function = definitions.name_at(getattr(diagnostic.node, "lineno", 1))
            finding = _to_finding(path, block, lines, diagnostic, function, selection)
            findings.append(replace(finding, suppressed=f"comment: {comment.reason}") if comment else finding)
    if selection.includes(UNUSED_SUPPRESSION):
        findings += [_unused_suppression(path, block, comment) for comment in suppressions.unused()]
    return findings


def _unused_suppression(path: str, block: CodeBlock, comment: Comment) -> LintFinding:
    line, cell = block.locate(comment.line)
    return LintFinding(
        code=UNUSED_SUPPRESSION,
        severity=Severity(all_pages()[UNUSED_SUPPRESSION].severity),
        file=path,
        line=line,
        column=1,
        end_line=line,
        end_column=1,
        cell=cell,
        function="",
        cause=f"this suppression of {', '.join(comment.codes)} hides nothing",
        advice="remove it",
        fixable=False,
        source=comment.code,
    )


def severity_of(diagnostic: Diagnostic) -> Severity:
    """Return the severity of a diagnostic: at most a warning if it is likely, a note if it is uncertain."""
    if diagnostic.certainty == Certainty.UNKNOWN:
        return Severity.NOTE
    severity = Severity(all_pages()[diagnostic.code].severity)
    is_weaker = diagnostic.certainty == Certainty.LIKELY and severity == Severity.ERROR
    return Severity.WARNING if is_weaker else severity


def _to_finding(
    path: str,
    block: CodeBlock,
    lines: list[str],
    diagnostic: Diagnostic,
    function: str,
    selection: RuleSelection,
) -> LintFinding:
    node, how = diagnostic.node, applicability(diagnostic.fix, selection.torch)
    first = int(getattr(node, "lineno", 1))
    last = int(getattr(node, "end_lineno", first) or first)
    column = character_column(lines[first - 1], getattr(node, "col_offset", 0))
    end_column = character_column(lines[last - 1], getattr(node, "end_col_offset", 0) or 0)
    line, cell = block.locate(first)
    return LintFinding(
        code=diagnostic.code,
        severity=severity_of(diagnostic),
        file=path,
        line=line,
        column=column + block.indent + 1,
        end_line=block.locate(last)[0],
        end_column=end_column + block.indent + 1,
        cell=cell,
        function=function,
        cause=diagnostic.cause,
        advice=diagnostic.advice + _version_conflict(diagnostic.fix, selection),
        fixable=how == Applicability.SAFE,
        fixable_unsafely=how == Applicability.UNSAFE,
        source=lines[first - 1].strip("\r"),
    )


def _version_conflict(fix: Fix | None, selection: RuleSelection) -> str:
    """Return why a fix is not offered, if the project allows versions of torch that it does not support."""
    if fix is None or applicability(fix, selection.torch) != Applicability.NONE:
        return ""
    return f"; that needs torch {needed_torch(fix)}, and {selection.torch.file} allows {selection.torch}"


class _Definitions:
    """Qualified names of functions and classes by the lines that they cover."""

    def __init__(self, text: str) -> None:
        self._ranges: list[tuple[int, int, str]] = []
        self._add(parse(text).body, "")

    def _add(self, body: Sequence[ast.stmt], outer: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{outer}.{node.name}" if outer else node.name
                self._ranges.append((node.lineno, node.end_lineno or node.lineno, name))
                self._add(node.body, name)

    def name_at(self, line: int) -> str:
        """Return the name of the innermost definition around a line; empty at module level."""
        around = [(last - first, name) for first, last, name in self._ranges if first <= line <= last]
        return min(around, key=lambda pair: pair[0])[1] if around else ""
