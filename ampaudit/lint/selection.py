"""Which codes are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ampaudit.core.errors import UsageError, did_you_mean
from ampaudit.report.pages import all_pages
from ampaudit.report.pages.page import LINTED

__all__ = ["UNUSED", "RuleSelection"]


UNUSED = "AMP991"


@dataclass(frozen=True, slots=True)
class RuleSelection:
    """Which codes are wanted.

    Attributes:
        select: codes, or how they begin.
        ignore: the same, for those that are not.
    """

    select: tuple[str, ...] = (LINTED,)
    ignore: tuple[str, ...] = ()

    @classmethod
    def of(cls, select: Iterable[str], ignore: Iterable[str]) -> RuleSelection:
        """Of texts such as ``AMP807,AMP82``.

        Raises:
            UsageError: no code of a lint begins so.
        """
        return cls(tuple(_codes(select)) or (LINTED,), tuple(_codes(ignore)))

    def wants(self, code: str) -> bool:
        """Whether a finding is to be reported; of two that fit, the longer decides."""
        if code == UNUSED:
            return UNUSED not in self.ignore
        chosen = max((len(start) for start in self.select if code.startswith(start)), default=-1)
        refused = max((len(start) for start in self.ignore if code.startswith(start)), default=-1)
        return chosen > refused


def _codes(texts: Iterable[str]) -> Iterator[str]:
    known = [code for code in all_pages() if code.startswith(LINTED)] + [UNUSED]
    for text in texts:
        for part in text.split(","):
            code = part.strip().upper()
            if not code:
                continue
            if code == "ALL":
                code = LINTED
            if not any(name.startswith(code) for name in known):
                hint = (
                    did_you_mean(code, known)
                    + "ampaudit explain lists all codes; those of lint begin with AMP8"
                )
                raise UsageError(f"no code of lint begins with {part.strip()!r}", hint=hint)
            yield code
