"""Assigns ids to sites: a site is one op of one layer, with the same id in all results."""

from __future__ import annotations

import glob
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NewType

SiteId = NewType("SiteId", str)


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of Python code: its position and text."""

    file: str
    line: int
    code: str = ""


class SiteNumbering:
    """Assigns ids such as ``encoder.layer.3.output/linear``, with ``#2`` for the second of its kind.

    Reserved ids are already in use.
    """

    def __init__(self, reserved: Iterable[SiteId | None] = ()) -> None:
        self._counts: Counter[str] = Counter()
        self._reserved = frozenset(reserved)

    def next_id(self, layer: str, op: str) -> SiteId:
        """Return the id of the next such op of a layer, in graph order."""
        base = f"{layer or '(top)'}/{op}"
        while True:
            self._counts[base] += 1
            count = self._counts[base]
            site = SiteId(base if count == 1 else f"{base}#{count}")
            if site not in self._reserved:
                return site


def pattern_of(name: str) -> str:
    """Replace each number in a site id or layer path by a star, so that stacked layers share a pattern."""
    return re.sub(r"(?<=[./])\d+(?=[./]|$)", "*", name)


def globs_of(names: Sequence[str], every: Iterable[str]) -> list[str]:
    """Return globs that match ``names`` and no other name in ``every``, with stars for stacked layers."""
    mine = set(names)
    by_pattern: dict[str, list[str]] = defaultdict(list)
    for name in names:
        by_pattern["*".join(glob.escape(part) for part in pattern_of(name).split("*"))].append(name)
    others = [name for name in every if name not in mine]
    globs: list[str] = []
    for pattern, members in by_pattern.items():
        alone = len(members) == 1 or any(fnmatchcase(other, pattern) for other in others)
        globs.extend(map(glob.escape, members) if alone else [pattern])
    return globs
