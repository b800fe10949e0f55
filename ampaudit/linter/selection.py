"""Selects the diagnostics that count: by codes, by files, and by comments in the code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ampaudit.core.errors import UsageError, did_you_mean
from ampaudit.core.text import Comment, comments_of
from ampaudit.core.untrusted import describe
from ampaudit.findings.pages import all_pages
from ampaudit.findings.pages.page import LINTED
from ampaudit.linter.config import LintConfig
from ampaudit.linter.diagnostic import Fix, Mistake
from ampaudit.linter.discovery import matches

UNUSED_SUPPRESSION = "AMP991"


@dataclass(frozen=True, slots=True)
class RuleSelection:
    """The rules that are enabled.

    Attributes:
        select: Codes or prefixes to enable.
        ignore: Codes or prefixes to disable.
        per_file: Globs of files with codes or prefixes to disable there.
        unsafe_fixes: Whether to apply fixes that need review as well.
    """

    select: tuple[str, ...] = (LINTED,)
    ignore: tuple[str, ...] = ()
    per_file: tuple[tuple[str, tuple[str, ...]], ...] = ()
    unsafe_fixes: bool = False

    @classmethod
    def of(cls, config: LintConfig) -> RuleSelection:
        """Parse comma-separated lists such as ``AMP807,AMP82``.

        Raises:
            UsageError: A code or prefix matches no rule, or a per-file entry has no codes.
        """
        selected = tuple(_parse_codes(config.select)) or (LINTED,)
        per_file = tuple(map(_parse_entry, config.per_file_ignores))
        return cls(selected, tuple(_parse_codes(config.ignore)), per_file, config.unsafe_fixes)

    def for_file(self, path: Path) -> RuleSelection:
        """Return the rules that are enabled in a file."""
        more = tuple(code for glob, codes in self.per_file if matches(path, (glob,)) for code in codes)
        return replace(self, ignore=(*self.ignore, *more))

    def includes(self, code: str) -> bool:
        """Return whether a rule is enabled: of the prefixes that match, the longest decides."""
        if code == UNUSED_SUPPRESSION:
            return code not in self.ignore
        selected = max((len(prefix) for prefix in self.select if code.startswith(prefix)), default=-1)
        ignored = max((len(prefix) for prefix in self.ignore if code.startswith(prefix)), default=-1)
        return selected > ignored

    def fixes(self, text: str, diagnostics: Sequence[Mistake]) -> list[Fix]:
        """Return the fixes of a text's diagnostics that may be applied."""
        comments = comments_of(text)
        return [
            item.fix
            for item in diagnostics
            if item.fix is not None
            and (item.fix.is_safe or self.unsafe_fixes)
            and self.includes(item.code)
            and not suppression_of(item, comments)
        ]


def suppression_of(diagnostic: Mistake, comments: Sequence[Comment]) -> Comment | None:
    """Return the comment on the first or last line of a diagnostic that suppresses it."""
    lines = (getattr(diagnostic.node, "lineno", 1), getattr(diagnostic.node, "end_lineno", 1))
    matching = (c for c in comments if c.line in lines and (not c.codes or diagnostic.code in c.codes))
    return next(matching, None)


def _parse_entry(text: str) -> tuple[str, tuple[str, ...]]:
    """Parse an entry such as ``tests/*:AMP86,AMP802``."""
    glob, _, codes = text.rpartition(":")
    if not glob or not codes.strip():
        raise UsageError(
            f"{describe(text)} is not a glob of files with codes", hint="write it as 'tests/*:AMP86'"
        )
    return glob, tuple(_parse_codes([codes]))


def _parse_codes(texts: Iterable[str]) -> Iterator[str]:
    known = ["ALL", UNUSED_SUPPRESSION, *(code for code in all_pages() if code.startswith(LINTED))]
    for code in (part.strip().upper() for text in texts for part in text.split(",") if part.strip()):
        if not any(name.startswith(code) for name in known):
            hint = "run 'ampaudit explain' for all codes; lint's begin with AMP8"
            raise UsageError(
                f"{describe(code)!r} matches no lint rule", hint=did_you_mean(code, known) + hint
            )
        yield LINTED if code == "ALL" else code
