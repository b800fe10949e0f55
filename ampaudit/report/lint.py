"""The document of ``lint``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampaudit.core.text import escape_control
from ampaudit.findings.finding import FailOn, Gate, Severity
from ampaudit.report.card import CardRows, Displayable, counted


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One mistake in a script.

    Attributes:
        file: Path as passed by the user.
        line: First line, from 1; in a notebook, within the cell.
        column: First column in characters, from 1.
        end_column: Column after the last character.
        cell: Number of a notebook's cell, from 1, among all cells.
        function: Dotted name of the enclosing function; empty at module level.
        advice: Suggested code.
        fixable: Whether ``--fix`` can fix it.
        fixable_unsafely: Whether ``--fix --unsafe-fixes`` can fix it.
        suppressed: Reason why it does not count; ``None`` if it counts.
        file_line: Line in the JSON file of a notebook, from 1.
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
class LintReport(Displayable):
    """The findings in all linted files.

    Attributes:
        schema: Version of this document.
        tool_version: Version of ampaudit.
        fail_on: Lowest severity that fails the report.
        linted: Number of files that were read.
        findings: Findings by file and line.
        unread: Files that could not be read.
        fixed: Number of mistakes that were fixed, or would be.
        unreadable: Number of files of which nothing could be read.
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
