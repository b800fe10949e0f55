"""Decides which rules are enabled, from codes and prefixes such as ``AMP80``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ampaudit.core.errors import UsageError, did_you_mean
from ampaudit.core.untrusted import describe
from ampaudit.linter.config import LintConfig
from ampaudit.linter.diagnostic import Applicability, Fix
from ampaudit.linter.discovery import matches
from ampaudit.linter.fix_safety import UNDECLARED, DeclaredTorch, applicability, declared_torch
from ampaudit.report.finding import Severity
from ampaudit.report.pages import all_pages
from ampaudit.report.pages.page import LINTED

__all__ = ["UNUSED_SUPPRESSION", "RuleSelection"]

UNUSED_SUPPRESSION = "AMP991"


@dataclass(frozen=True, slots=True)
class RuleSelection:
    """The rules that are enabled.

    Attributes:
        select: Codes or prefixes to enable.
        ignore: Codes or prefixes to disable.
        notes: Whether rules of severity note are enabled without being selected.
        per_file: Globs of files with codes or prefixes to disable there.
        unsafe_fixes: Whether to apply fixes that need review as well.
        torch: Versions of torch that the file's project allows.
    """

    select: tuple[str, ...] = (LINTED,)
    ignore: tuple[str, ...] = ()
    notes: bool = True
    per_file: tuple[tuple[str, tuple[str, ...]], ...] = ()
    unsafe_fixes: bool = False
    torch: DeclaredTorch = UNDECLARED

    @classmethod
    def of(cls, config: LintConfig) -> RuleSelection:
        """Parse comma-separated lists such as ``AMP807,AMP82``.

        Raises:
            UsageError: A code or prefix matches no rule, or a per-file entry has no codes.
        """
        selected = tuple(_parse_codes(config.select))
        notes = config.notes or config.fail_on == "note" or LINTED in selected
        per_file = tuple(map(_parse_entry, config.per_file_ignores))
        ignored = tuple(_parse_codes(config.ignore))
        return cls(selected or (LINTED,), ignored, notes, per_file, config.unsafe_fixes)

    def for_file(self, path: Path) -> RuleSelection:
        """Return the rules that are enabled in a file, with what its project says of torch."""
        more = tuple(code for glob, codes in self.per_file if matches(path, (glob,)) for code in codes)
        return replace(self, ignore=(*self.ignore, *more), torch=declared_torch(path.absolute().parent))

    def applies(self, fix: Fix | None) -> bool:
        """Return whether ``--fix`` applies a fix."""
        how = applicability(fix, self.torch)
        return how == Applicability.SAFE or (how == Applicability.UNSAFE and self.unsafe_fixes)

    def includes(self, code: str, severity: Severity | None = None) -> bool:
        """Return whether a rule is enabled, at a severity if it has several; the longer prefix decides."""
        if code == UNUSED_SUPPRESSION:
            return code not in self.ignore
        selected = max((len(prefix) for prefix in self.select if code.startswith(prefix)), default=-1)
        severity = severity or Severity(all_pages()[code].severity)
        if selected == len(LINTED) and not self.notes and severity == Severity.NOTE:
            return False
        ignored = max((len(prefix) for prefix in self.ignore if code.startswith(prefix)), default=-1)
        return selected > ignored


def _parse_entry(text: str) -> tuple[str, tuple[str, ...]]:
    """Parse an entry such as ``tests/*:AMP86,AMP802``."""
    glob, _, codes = text.rpartition(":")
    if not glob or not codes.strip():
        raise UsageError(
            f"{describe(text)} is not a glob of files with codes", hint="write it as 'tests/*:AMP86'"
        )
    return glob, tuple(_parse_codes([codes]))


def _parse_codes(texts: Iterable[str]) -> Iterator[str]:
    all_codes = [code for code in all_pages() if code.startswith(LINTED)] + [UNUSED_SUPPRESSION]
    for text in texts:
        for part in filter(None, map(str.strip, text.split(","))):
            code = LINTED if part.upper() == "ALL" else part.upper()
            if not any(name.startswith(code) for name in all_codes):
                hint = (
                    did_you_mean(code, all_codes)
                    + "run 'ampaudit explain' for all codes; lint's begin with AMP8"
                )
                raise UsageError(f"{describe(part)!r} matches no lint rule", hint=hint)
            yield code
