"""The traced model as a value: one flat graph, its sites in order, and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from ampaudit.policy import Decision, OpFacts
from ampaudit.policy.schema import Constants
from ampaudit.sites import SiteId, SourceLine
from ampaudit.trace.entry import OutputStructure
from ampaudit.trace.state import StateChange

__all__ = ["Placeholder", "Role", "Site", "Slot", "TracedModel"]


class Role(StrEnum):
    """What a site does to its input."""

    COMPUTE = "compute"  # makes new values
    VIEW = "view"  # shows the same values under another shape
    SELECT = "select"  # picks, moves or zeroes elements of its inputs: no new values
    CAST = "cast"  # a conversion in the author's code
    INSERTED_CAST = "inserted-cast"  # a conversion that the policy added
    WEIGHT_CAST = "weight-cast"  # a parameter, buffer or constant that is converted

    @property
    def converts(self) -> bool:
        """Whether the site is a conversion, whoever made it."""
        return self in (Role.CAST, Role.INSERTED_CAST, Role.WEIGHT_CAST)

    @property
    def inserted(self) -> bool:
        """Whether the policy put the site there."""
        return self in (Role.INSERTED_CAST, Role.WEIGHT_CAST)


class Slot(StrEnum):
    """Where the value of a placeholder comes from."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"


@dataclass(frozen=True, slots=True)
class Placeholder:
    """One input of the graph.

    Attributes:
        node: the placeholder's node name.
        slot: what kind of value it takes.
        name: the parameter's or buffer's path, the constant's name, or ``input[i]``.
        dtype: dtype in the converted model (the stored dtype for weights).
    """

    node: str
    slot: Slot
    name: str
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class Site:
    """One op of one layer.

    Attributes:
        id: stable across runs: layer path, op name and, from the second on, its number.
        node: name of its node in the graph.
        layer: module path; empty for the top module.
        layer_type: class name of that module.
        op: the ATen op, such as ``aten.linear.default``.
        dtype: dtype of its (first floating-point) output, ``None`` where it has none.
        shape: shape of that output.
        decision: what the policy did and why.
        source: line of the model's code; ``caller`` the user's own line where that is another one.
        weight: name of the parameter, buffer or constant, for a weight cast.
        facts: what the decision was made from; ``None`` for what the policy or the tracer added.
        exact: arguments that the policy changed, by position or name, as the FP32 model has them.
    """

    id: SiteId
    node: str
    layer: str
    layer_type: str
    op: str
    role: Role
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    decision: Decision
    source: SourceLine | None
    caller: SourceLine | None
    weight: str | None = None
    facts: OpFacts | None = None
    exact: Mapping[int | str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A flat FX graph of ATen ops with the policy's casts in it, before decomposition.

    ``tensors`` maps placeholder names to the model's own FP32 tensors (never copies); ``signature`` are
    the shapes and dtypes that the graph is valid for; ``clip`` is what the policy does to weights that do not
    fit; ``split_ties`` names tied weights that the policy would store differently under each name;
    ``structure`` is what the outputs were in; ``customs`` names custom autograd functions, whose own backward
    the graph does not have, and ``checkpoint``, if activations are recomputed. ``changes`` are what the
    model's code did to its own Python state, and ``drew`` says that it drew random numbers which the graph
    holds as constants: then it is a graph of one call. ``reads`` are the lines that read a precision.
    """

    graph: fx.Graph
    placeholders: tuple[Placeholder, ...]
    tensors: dict[str, torch.Tensor]
    sites: tuple[Site, ...]
    outputs: tuple[str, ...]
    signature: tuple[Any, ...]
    policy: str
    dtype: torch.dtype
    notes: tuple[str, ...]
    clip: Constants | None = None
    split_ties: tuple[tuple[str, ...], ...] = ()
    structure: OutputStructure | None = None
    customs: tuple[str, ...] = ()
    changes: tuple[StateChange, ...] = ()
    drew: bool = False
    reads: tuple[SourceLine, ...] = ()

    @property
    def site_of_node(self) -> dict[str, Site]:
        """Sites by node name."""
        return {site.node: site for site in self.sites}
