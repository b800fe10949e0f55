"""The result of comparing a graph with a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from ampaudit.core.sites import SiteId
from ampaudit.trace.graph import Site

__all__ = ["ModelComparison", "ModelDifference"]


@dataclass(frozen=True, slots=True)
class ModelDifference:
    """One difference between an audited graph and its reference.

    Attributes:
        kind: ``value``: the op computes something else from the same inputs; ``constant``, ``weight`` and
            ``missing``: a number, a weight or an op of the reference is not there;
            ``clamped``: a number that the format lacks is its largest, as in masks.
        site: of the audited graph.
        counterpart: the site of the reference, if there is one.
        what: what differs.
        outputs: the outputs that are wrong because of it; none if it makes no difference on this input.
    """

    kind: Literal["value", "constant", "weight", "missing", "clamped"]
    site: Site
    counterpart: Site | None
    what: str
    outputs: tuple[str, ...] = ()

    @property
    def place(self) -> SiteId:
        """The site's id."""
        return self.site.id


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """How an audited graph corresponds to a reference.

    Attributes:
        matched: pairs of sites, the audited one first.
        only_reference: sites of the reference without a partner.
        only_audited: sites of the audited graph without a partner.
        differences: what differs, first what makes outputs wrong.
        outputs: the reference's outputs, by the audited graph's names.
    """

    matched: tuple[tuple[Site, Site], ...]
    only_reference: tuple[Site, ...]
    only_audited: tuple[Site, ...]
    differences: tuple[ModelDifference, ...]
    outputs: Mapping[str, torch.Tensor]

    @property
    def wrong(self) -> frozenset[str]:
        """Names of outputs that some op makes wrong by computing something else."""
        return frozenset(name for difference in self.differences for name in difference.outputs)
