"""The document of ``lint``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampaudit.core.text import escape_control
from ampaudit.report.card import CardRows, Shown, counted
from ampaudit.report.finding import FailOn, Gate, Severity

__all__ = ["LintFinding", "LintReport", "UnreadFile"]


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One mistake in a script.

    Attributes:
        code: of its page.
        severity: how much it matters.
        file: path as it was given.
        line: from 1; in a notebook, within the cell.
        column: from 1, in characters.
        end_line: where it ends.
        end_column: one behind its last character.
        cell: of a notebook, from 1, among all its cells.
        function: that it is in, dotted; empty in the module itself.
        cause: what is wrong here.
        advice: what to write instead.
        fixable: whether ``--fix`` can change it.
        fixable_unsafely: whether ``--fix`` can change it with ``--unsafe-fixes``.
        source: the line as it stands there.
        suppressed: why it does not count.
        file_line: line of a notebook's file, from 1.
    """

    code: str
    severity: Severity
    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    cell: int | None
    function: str
    cause: str
    advice: str
    fixable: bool
    source: str
    suppressed: str | None = None
    file_line: int | None = None
    fixable_unsafely: bool = False


@dataclass(frozen=True, slots=True)
class UnreadFile:
    """A file that could not be read, with the reason in one line."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{escape_control(self.file)}:{self.line}: not read: {escape_control(self.reason)}"


@dataclass(frozen=True, slots=True, repr=False)
class LintReport(Shown):
    """The findings in all linted files.

    Attributes:
        schema: version of this document.
        tool_version: version of ampaudit.
        fail_on: lowest severity that fails the report.
        linted: number of files that were read.
        findings: by file and line.
        unread: files that could not be read.
        fixed: number of mistakes that were fixed, or would be.
        unreadable: number of files of which nothing could be read.
    """

    schema: Literal[1]
    tool_version: str
    verdict: Gate
    gate: Gate
    fail_on: FailOn
    linted: int
    findings: tuple[LintFinding, ...]
    unread: tuple[UnreadFile, ...]
    fixed: int = 0
    unreadable: int = 0
    kind: Literal["lint"] = "lint"

    @property
    def active(self) -> tuple[LintFinding, ...]:
        """Findings that are not suppressed."""
        return tuple(finding for finding in self.findings if finding.suppressed is None)

    @property
    def exit_code(self) -> int:
        """2 if no file could be read; else 1 for findings at or above ``fail_on``; else 0."""
        if self.unread and self.unreadable >= self.linted:
            return 2
        return 1 if self.gate == "fail" else 0

    @property
    def headline(self) -> str:
        """The verdict, and what it is about."""
        extent = f"{counted(len(self.findings), 'finding')} in {counted(self.linted, 'file')}"
        return f"{self.verdict.upper()} {extent}"

    def card_rows(self) -> CardRows:
        """Return the findings."""
        return [(f.severity, f.code, f"{f.file}:{f.line}", f.cause) for f in self.findings]
