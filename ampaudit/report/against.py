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
    """A place at which the audited model computes something else than its reference.

    Attributes:
        kind: ``value`` (another function), ``constant``, ``weight``, ``missing`` (an op of the reference), or
            ``clamped`` (a number that the format lacks is its largest, as in masks).
        site: of the audited model.
        layer: of that site; in an ONNX graph, the name of the node.
        counterpart: the reference's site; ``None`` if it has none.
        source: the line of the reference, where it is known.
        what: the difference in words.
        outputs: outputs that are wrong because of it; none if it makes no difference on these inputs.
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
        reference: its location.
        matched: sites that compute something, with their counterparts.
        only_here: sites without a counterpart: parts of ops that are one op in the reference, or additions.
        only_reference: sites of the reference without a counterpart.
        differences: those that make outputs wrong first.
    """

    reference: str
    matched: tuple[Correspondence, ...]
    only_here: tuple[SiteId, ...]
    only_reference: tuple[SiteId, ...]
    differences: tuple[ReferenceDifference, ...]

    @property
    def extent(self) -> str:
        """How many ops correspond."""
        here, there = len(self.only_here), len(self.only_reference)
        return f"{plural(len(self.matched), 'op')} matched, {here} only here, {there} only in the reference"
