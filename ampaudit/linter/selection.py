"""Decides which rules are enabled, from codes and prefixes such as ``AMP80``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ampaudit.core.errors import UsageError, did_you_mean
from ampaudit.report.pages import all_pages
from ampaudit.report.pages.page import LINTED

__all__ = ["UNUSED_SUPPRESSION", "RuleSelection"]

UNUSED_SUPPRESSION = "AMP991"


@dataclass(frozen=True, slots=True)
class RuleSelection:
    """The rules that are enabled.

    Attributes:
        select: codes or prefixes to enable.
        ignore: codes or prefixes to disable.
    """

    select: tuple[str, ...] = (LINTED,)
    ignore: tuple[str, ...] = ()

    @classmethod
    def parse(cls, select: Iterable[str], ignore: Iterable[str]) -> RuleSelection:
        """Parse comma-separated lists such as ``AMP807,AMP82``.

        Raises:
            UsageError: a code or prefix matches no rule.
        """
        return cls(tuple(_parse_codes(select)) or (LINTED,), tuple(_parse_codes(ignore)))

    def includes(self, code: str) -> bool:
        """Return whether a rule is enabled; the longer of two matching prefixes decides."""
        if code == UNUSED_SUPPRESSION:
            return code not in self.ignore
        selected = max((len(prefix) for prefix in self.select if code.startswith(prefix)), default=-1)
        ignored = max((len(prefix) for prefix in self.ignore if code.startswith(prefix)), default=-1)
        return selected > ignored


def _parse_codes(texts: Iterable[str]) -> Iterator[str]:
    known = [code for code in all_pages() if code.startswith(LINTED)] + [UNUSED_SUPPRESSION]
    for text in texts:
        for part in filter(None, map(str.strip, text.split(","))):
            code = LINTED if part.upper() == "ALL" else part.upper()
            if not any(name.startswith(code) for name in known):
                hint = (
                    did_you_mean(code, known) + "run 'ampaudit explain' for all codes; lint's begin with AMP8"
                )
                raise UsageError(f"{part!r} matches no lint rule", hint=hint)
            yield code
