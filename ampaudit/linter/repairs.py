"""Repairs a script fix by fix, and keeps what leaves no new mistake behind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from ampaudit.linter.diagnostic import Diagnostic, Fix
from ampaudit.linter.flow.script import ScriptTooLong
from ampaudit.linter.reporting import Suppressions, severity_of
from ampaudit.linter.selection import RuleSelection

__all__ = ["repaired"]

_MAX_ROUNDS = 10
_Analyze: TypeAlias = Callable[[str], list[Diagnostic]]


class _Analyzed(NamedTuple):
    """A text with its diagnostics."""

    text: str
    diagnostics: list[Diagnostic]


def repaired(
    text: str, diagnostics: list[Diagnostic], analyze: _Analyze, selection: RuleSelection
) -> tuple[str, list[Diagnostic], int]:
    """Fix until nothing fixable remains; return the text, what remains, and how many were fixed.

    If all fixes together leave a mistake that was not there, each is tried by itself. ``analyze`` returns
    the diagnostics of a text.
    """
    start = _Analyzed(text, diagnostics)
    if re.search(r"\r(?!\n)", text):
        return text, diagnostics, 0  # libcst does not preserve line ends of classic Mac OS
    end = _fix_all(start, analyze, selection)
    if _has_new_mistakes(end, start):
        end = _fix_one_by_one(start, analyze, selection)
    fixed = max(len(diagnostics) - len(end.diagnostics), 0) if end.text != text else 0
    return end.text, end.diagnostics, fixed


def _fix_all(now: _Analyzed, analyze: _Analyze, selection: RuleSelection) -> _Analyzed:
    seen = {now.text}
    for _ in range(_MAX_ROUNDS):
        fixes = _fixes(now, selection)
        after = _applied(now.text, fixes, analyze) if fixes else None
        if after is None or after.text in seen:  # no fix could be applied, or one undoes another
            break
        seen.add(after.text)
        now = after
    return now


def _fix_one_by_one(now: _Analyzed, analyze: _Analyze, selection: RuleSelection) -> _Analyzed:
    tried: set[tuple[str, ...]] = set()
    while True:
        lines = now.text.split("\n")
        left = {(fix.kind, *fix.details, lines[fix.line - 1]): fix for fix in _fixes(now, selection)}
        key = next((key for key in left if key not in tried), None)
        if key is None:
            return now
        tried.add(key)
        after = _applied(now.text, [left[key]], analyze)
        if after is not None and not _has_new_mistakes(after, now):
            now = after


def _fixes(now: _Analyzed, selection: RuleSelection) -> list[Fix]:
    suppressions = Suppressions(now.text)
    return [
        item.fix
        for item in now.diagnostics
        if item.fix is not None
        and selection.applies(item.fix)
        and selection.includes(item.code, severity_of(item))
        and not suppressions.matching(item)
    ]


def _applied(text: str, fixes: Sequence[Fix], analyze: _Analyze) -> _Analyzed | None:
    """Apply fixes and analyze the result; ``None`` if it cannot be read."""
    import libcst

    from ampaudit.linter.fixes import apply_fixes

    try:
        fixed = apply_fixes(text, fixes)
        return _Analyzed(fixed, analyze(fixed))
    except (libcst.ParserSyntaxError, SyntaxError, ValueError, RecursionError, ScriptTooLong):
        return None


def _has_new_mistakes(after: _Analyzed, before: _Analyzed) -> bool:
    def counts(analyzed: _Analyzed) -> Counter[str]:
        return Counter(item.code for item in analyzed.diagnostics)

    return bool(counts(after) - counts(before))
