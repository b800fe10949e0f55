"""The result of comparing a graph with a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from ampaudit.trace.graph import Site


@dataclass(frozen=True, slots=True)
class ModelDifference:
    """One difference between an audited graph and its reference."""

    # ``value``: the op computes something else from the same inputs; ``constant``, ``weight`` and
    # ``missing``: a number, a weight or an op of the reference is changed or missing; ``clamped``: a number
    # beyond the format is replaced by its largest, as in masks
    kind: Literal["value", "constant", "weight", "missing", "clamped"]
    site: Site  # site of the audited graph
    counterpart: Site | None  # site of the reference, if any
    what: str  # description of the difference
    # outputs that are wrong because of it; empty if it has no effect on this input
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """The correspondence between an audited graph and a reference."""

    matched: tuple[tuple[Site, Site], ...]  # pairs of sites, the audited one first
    only_reference: tuple[Site, ...]  # sites of the reference without a partner
    only_audited: tuple[Site, ...]  # sites of the audited graph without a partner
    differences: tuple[ModelDifference, ...]  # differences, starting with those that make outputs wrong
    outputs: Mapping[str, torch.Tensor]  # outputs of the reference, by the audited graph's names

    @property
    def wrong(self) -> frozenset[str]:
        """Names of outputs that are wrong because of some difference."""
        return frozenset(name for difference in self.differences for name in difference.outputs)
