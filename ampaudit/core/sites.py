"""A site is one op of one layer; its id joins everything that is said about it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NewType

__all__ = ["SiteId", "SiteNumbering", "SourceLine", "pattern_of"]

SiteId = NewType("SiteId", str)


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of somebody's Python code: where it is and what it says."""

    file: str
    line: int
    code: str = ""


class SiteNumbering:
    """Hands out ids such as ``encoder.layer.3.output/linear``, with ``#2`` for the second of its kind.

    Args:
        taken: ids that somebody else has handed out.
    """

    def __init__(self, taken: Iterable[SiteId | None] = ()) -> None:
        self._seen: Counter[str] = Counter()
        self._taken = frozenset(taken)

    def next_id(self, layer: str, op: str) -> SiteId:
        """The next id for that op of that layer, in graph order."""
        base = f"{layer or '(top)'}/{op}"
        while True:
            self._seen[base] += 1
            count = self._seen[base]
            made = SiteId(base if count == 1 else f"{base}#{count}")
            if made not in self._taken:
                return made


def pattern_of(name: str) -> str:
    """A site or layer with a star for each number: what the layers of a stack have in common."""
    return re.sub(r"(?<=\.)\d+(?=[./]|$)", "*", name)
