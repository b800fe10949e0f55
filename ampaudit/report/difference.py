"""The document of ``diff``: changes from one report to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampaudit.report.card import Shown

__all__ = ["Difference", "Differences", "Direction", "ReportSummary", "SiteChange"]

Direction = Literal["worse", "better", "other"]


@dataclass(frozen=True, slots=True)
class SiteChange:
    """One change.

    Attributes:
        way: ``worse``, ``better``, or ``other``: neither by itself.
        layer: its module path; empty for what is about the whole model.
        site: the op, or the output.
        what: in words, before and after.
        before: the number behind it, if there is one.
        after: the same, now.
    """

    way: Direction
    layer: str
    site: str
    what: str
    before: float | None = None
    after: float | None = None


@dataclass(frozen=True, slots=True)
class ReportSummary:
    """One of the two compared reports."""

    source: str
    policy: str
    dtype: str
    verdict: str
    tool_version: str


@dataclass(frozen=True, slots=True)
class Difference:
    """Two reports of one policy.

    Attributes:
        old: which was first.
        new: which came later.
        changes: in the new graph's order, what is gone last.
        same: sites in both reports that are as they were, smaller changes included.
        added: sites that only the new one has.
        removed: sites that only the old one has.
        notes: why the two may not be comparable.
    """

    old: ReportSummary
    new: ReportSummary
    changes: tuple[SiteChange, ...]
    same: int
    added: tuple[str, ...]
    removed: tuple[str, ...]
    notes: tuple[str, ...]

    def of(self, way: Direction) -> tuple[SiteChange, ...]:
        """Return the changes of one kind."""
        return tuple(change for change in self.changes if change.way == way)


@dataclass(frozen=True, slots=True, repr=False)
class Differences(Shown):
    """One difference per policy that both files contain."""

    schema: Literal[1]
    bits: float
    decibels: float
    pairs: tuple[Difference, ...]
    kind: Literal["diff"] = "diff"

    @property
    def exit_code(self) -> int:
        """1 if anything got worse."""
        return int(any(pair.of("worse") for pair in self.pairs))

    @property
    def headline(self) -> str:
        """The verdict, and what it is about."""
        return "something is worse" if self.exit_code else "nothing is worse"
