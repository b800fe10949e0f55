"""Repairs scripts: applies fixes as long as they leave fewer mistakes and no new ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ampaudit.linter.diagnostic import Diagnostic, Fix
from ampaudit.linter.flow.script import ScriptTooLong
from ampaudit.linter.flow.values import Value
from ampaudit.linter.selection import RuleSelection

__all__ = ["Analysis", "repair"]

_MAX_ROUNDS: Final = 10


@dataclass(frozen=True, slots=True)
class Analysis:
    """What is known of a text.

    Attributes:
        text: Text itself.
        diagnostics: Mistakes in it.
        names: Values of the imported names at its end.
        imported: Paths, texts and diagnostics of the files that it imports.
    """

    text: str
    diagnostics: Sequence[Diagnostic] = ()
    names: Mapping[str, Value] = field(default_factory=dict)
    imported: Sequence[tuple[Path, str, list[Diagnostic]]] = ()

    def improves(self, other: Analysis) -> bool:
        """Return whether this text has fewer mistakes than another, and of no rule more."""
        now, before = (Counter(item.code for item in text.diagnostics) for text in (self, other))
        return now < before


def repair(now: Analysis, analyze: Callable[[str], Analysis], selection: RuleSelection) -> Analysis:
    """Apply fixes together or, where that causes a new mistake, each by itself.

    Args:
        now: Text to repair, with its diagnostics.
        analyze: Function that analyzes a text.
        selection: Enabled rules.
    """
    if re.search(r"\r(?!\n)", now.text):
        return now  # libcst does not preserve line ends of classic Mac OS
    rejected: set[Fix] = set()
    while fixes := [fix for fix in selection.fixes(now.text, now.diagnostics) if fix not in rejected]:
        for attempt, rounds in ((fixes, _MAX_ROUNDS), (fixes[:1], 1)):
            after = _apply(now, attempt, analyze, selection, rounds)
            if after.improves(now):
                now, rejected = after, set()
                break
        else:
            rejected.add(fixes[0])
    return now


def _apply(
    now: Analysis,
    fixes: Sequence[Fix],
    analyze: Callable[[str], Analysis],
    selection: RuleSelection,
    rounds: int,
) -> Analysis:
    """Apply fixes and, in further rounds, those of the result; stop where it cannot be read."""
    import libcst

    from ampaudit.linter.fixes import apply_fixes

    for _ in range(rounds):
        try:
            now = analyze(apply_fixes(now.text, fixes))
        except (libcst.ParserSyntaxError, SyntaxError, ValueError, RecursionError, ScriptTooLong):
            break
        fixes = selection.fixes(now.text, now.diagnostics)
        if not fixes:
            break
    return now
