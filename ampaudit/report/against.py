"""A comparison of the audited model with a reference (``--against``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampaudit.core.sites import SiteId
from ampaudit.core.text import plural
from ampaudit.report.finding import Source

__all__ = ["AgainstReport", "Correspondence", "ReferenceDifference"]


@dataclass(frozen=True, slots=True)
class Correspondence:
    """A site of the audited model and the reference's site that computes the same."""

    site: SiteId
    counterpart: SiteId


@dataclass(frozen=True, slots=True)
class ReferenceDifference:
    """A difference between the functions that the audited model and its reference compute.

    Attributes:
        kind: ``value`` (another function), ``constant``, ``weight``, ``missing`` (an op of the reference), or
            ``clamped`` (a number that the format lacks is its largest, as in masks).
        site: Site of the audited model.
        layer: Module path of that site; in an ONNX graph, the name of the node.
        counterpart: Site of the reference; ``None`` if it has none.
        source: Line of the reference, if known.
        what: Description of the difference.
        outputs: Outputs that it makes wrong; empty if it has no effect on these inputs.
    """

    kind: Literal["value", "constant", "weight", "missing", "clamped"]
    site: SiteId
    layer: str
    counterpart: SiteId | None
    source: Source | None
    what: str
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AgainstReport:
    """How the audited model corresponds to its reference.

    Attributes:
        reference: Location of the reference.
        matched: Computing sites with their counterparts.
        only_here: Sites without a counterpart: additions, or parts of an op of the reference.
        only_reference: Sites of the reference without a counterpart.
        differences: Differences, those that make outputs wrong first.
    """

    reference: str
    matched: tuple[Correspondence, ...]
    only_here: tuple[SiteId, ...]
    only_reference: tuple[SiteId, ...]
    differences: tuple[ReferenceDifference, ...]

    @property
    def extent(self) -> str:
        """The number of matched ops, and of those on one side only."""
        here, there = len(self.only_here), len(self.only_reference)
        return f"{plural(len(self.matched), 'op')} matched, {here} only here, {there} only in the reference"
