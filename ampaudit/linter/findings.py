"""Makes findings of diagnostics: severity, place in the file, enclosing function, suppression."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from ampaudit.core.text import comments_of
from ampaudit.linter.diagnostic import Certainty, Diagnostic
from ampaudit.linter.flow.script import parse
from ampaudit.linter.flow.syntax import nested_blocks
from ampaudit.linter.selection import UNUSED_SUPPRESSION, RuleSelection, suppression_of
from ampaudit.linter.source_text import CodeBlock, character_column, split_lines
from ampaudit.report.finding import Severity
from ampaudit.report.lint import LintFinding
from ampaudit.report.pages import all_pages
from ampaudit.report.pages.page import LINTED

__all__ = ["to_findings", "unused_suppressions"]


def to_findings(
    path: str, block: CodeBlock, diagnostics: Sequence[Diagnostic], selection: RuleSelection
) -> Iterator[LintFinding]:
    """Yield the findings of the enabled rules, including suppressed ones."""
    lines, comments = split_lines(block.text), comments_of(block.text)
    included = [item for item in diagnostics if selection.includes(item.code)]
    tree = parse(block.text if included else "")
    for item in included:
        first = int(getattr(item.node, "lineno", 1))
        last = int(getattr(item.node, "end_lineno", first) or first)
        column = character_column(lines[first - 1], getattr(item.node, "col_offset", 0))
        end_column = character_column(lines[last - 1], getattr(item.node, "end_col_offset", 0) or 0)
        line, cell = block.locate(first)
        comment = suppression_of(item, comments)
        yield LintFinding(
            code=item.code,
            severity=_severity_of(item),
            file=path,
            line=line,
            column=column + block.indent + 1,
            end_line=block.locate(last)[0],
            end_column=end_column + block.indent + 1,
            cell=cell,
            function=_function_at(tree, first),
            cause=item.cause,
            advice=item.advice,
            fixable=item.fix is not None and item.fix.is_safe,
            fixable_unsafely=item.fix is not None and not item.fix.is_safe,
            source=lines[first - 1].strip("\r"),
            suppressed=f"comment: {comment.reason}" if comment else None,
        )


def _function_at(tree: ast.Module, line: int) -> str:
    """Return the dotted name of the innermost function or class at a line; empty at module level."""
    names, block = [], tree.body
    while node := next((node for node in block if node.lineno <= line <= (node.end_lineno or line)), None):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        block = [inner for nested in nested_blocks(node) for inner in nested]
    return ".".join(names)


def _severity_of(diagnostic: Diagnostic) -> Severity:
    """Return the severity of a diagnostic, which is at most a warning if it is only likely."""
    severity = Severity(all_pages()[diagnostic.code].severity)
    is_weaker = diagnostic.certainty == Certainty.LIKELY and severity == Severity.ERROR
    return Severity.WARNING if is_weaker else severity


def unused_suppressions(
    path: str, block: CodeBlock, diagnostics: Sequence[Diagnostic], selection: RuleSelection
) -> Iterator[LintFinding]:
    """Yield a finding for each comment that names lint rules and suppresses no diagnostic."""
    comments = comments_of(block.text) if selection.includes(UNUSED_SUPPRESSION) else []
    used = [suppression_of(item, comments) for item in diagnostics]
    for comment in comments:
        if comment in used or not comment.codes or not all(c.startswith(LINTED) for c in comment.codes):
            continue
        line, cell = block.locate(comment.line)
        yield LintFinding(
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
