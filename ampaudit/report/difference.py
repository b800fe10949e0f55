"""The document of ``diff``: changes from one report to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampaudit.report.card import Displayable

Direction = Literal["worse", "better", "other"]


@dataclass(frozen=True, slots=True)
class SiteChange:
    """One change.

    Attributes:
        way: ``worse``, ``better``, or ``other`` for neither.
        layer: Module path; empty for the whole model.
        site: Name of the op or output.
        before: Number in the old report, if the change has one.
        after: Number in the new report, if the change has one.
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
        changes: Changes in the order of the new graph, removed sites last.
        same: Number of common sites without a change above the thresholds.
        added: Sites only in the new report.
        removed: Sites only in the old report.
        notes: Differences in settings that limit the comparison.
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
class Differences(Displayable):
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
