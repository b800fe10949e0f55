"""Defines the traced model as a value: one flat graph, its sites in order, and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from ampaudit.core.sites import SiteId, SourceLine
from ampaudit.policy import Decision, OpFacts
from ampaudit.policy.schema import Constants
from ampaudit.trace.entry import OutputStructure
from ampaudit.trace.path.reads import ValueRead
from ampaudit.trace.state import StateChange
from ampaudit.trace.twins import TwinCall

__all__ = ["CustomBackward", "FunctionCall", "Placeholder", "Role", "Site", "Slot", "TracedModel"]


class Role(StrEnum):
    """What a site does to its input."""

    COMPUTE = "compute"  # makes new values
    VIEW = "view"  # the same values in another shape
    SELECT = "select"  # picks, moves or zeroes elements of its inputs
    CAST = "cast"  # a conversion in the model's code
    INSERTED_CAST = "inserted-cast"  # a conversion that the policy added
    WEIGHT_CAST = "weight-cast"  # a parameter, buffer or constant that is converted

    @property
    def converts(self) -> bool:
        """Whether the site is a conversion."""
        return self in (Role.CAST, Role.INSERTED_CAST, Role.WEIGHT_CAST)

    @property
    def inserted(self) -> bool:
        """Whether the policy inserted the site."""
        return self in (Role.INSERTED_CAST, Role.WEIGHT_CAST)


class Slot(StrEnum):
    """The source of a placeholder's value."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"


@dataclass(frozen=True, slots=True)
class Placeholder:
    """One input of the graph.

    Attributes:
        node: the placeholder's node name.
        slot: the kind of value.
        name: the parameter's or buffer's path, the constant's name, or ``input[i]``.
        dtype: dtype in the converted model (of weights: the stored one).
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
        layer_type: class name of that module; of an ONNX node, its operator and its module if known.
        op: the ATen op, such as ``aten.linear.default``.
        dtype: dtype of its (first floating-point) output, ``None`` where it has none.
        shape: shape of that output.
        decision: what the policy did and why.
        source: line of the model's code.
        caller: the user's own line, if that is another one.
        weight: name of the parameter, buffer or constant, for a weight cast.
        facts: what the decision was made from; ``None`` for sites that the policy or the tracer added.
        original_args: arguments that the policy changed, by position or name, as the FP32 model has them.
        twin: the call of a custom op whose twin it is part of.
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
    original_args: Mapping[int | str, Any] = field(default_factory=dict)
    twin: TwinCall | None = None


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a custom autograd function, repeatable on other tensors.

    Attributes:
        function: the function's class.
        args: its arguments, with ``None`` in place of each tensor.
        tensors: positions of the tensors among the arguments.
        outputs: positions of the outputs that require a gradient.
    """

    function: Any
    args: tuple[Any, ...]
    tensors: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CustomBackward:
    """The backward of one call of a custom autograd function, or the hooks of one tensor.

    Attributes:
        number: its number in the graph's marks.
        name: such as ``Scale.backward``.
        layer: the layer that called the function or registered the hook.
        source: where it is defined, or the line that could not be traced.
        failure: why it could not be traced; ``None`` if it could.
        call: how to call the function as a whole, where that is possible.
        traced: its graph, separated from the model's. The outputs are the gradients it returns, then those of
            leaves, then values that other custom backwards read.
        inputs: origin of each graph input: ``gradient`` and the output's number, ``value`` and its index in
            the saved values, or ``shared`` and a name.
        returns: for each input of the function the index of its gradient, ``None`` for no gradient.
        leaves: indices, among the saved values, of leaves whose gradient the backward itself sets.
        shares: names of the remaining outputs.
    """

    number: int
    name: str
    layer: str
    source: SourceLine | None
    failure: str | None
    call: FunctionCall | None
    traced: TracedModel | None = None
    inputs: tuple[tuple[str, int | str], ...] = ()
    returns: tuple[int | None, ...] = ()
    leaves: tuple[int, ...] = ()
    shares: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A flat FX graph of ATen ops with the policy's casts, before decomposition.

    ``tensors`` maps placeholder names to the model's own FP32 tensors (never copies); ``signature`` are the
    shapes and dtypes that the graph is valid for; ``clip`` is what the policy does to weights that do not
    fit; ``split_ties`` names tied weights that the policy would store differently under each name;
    ``structure`` is the structure of the outputs; ``custom_functions`` names custom autograd functions, whose
    backward is not part of the graph, and ``checkpoint``, if activations are recomputed; ``custom_backwards``
    are their backwards, where gradients were asked for, and ``backward_notes`` what they leave out.
    ``changes`` are changes of the model's Python state, and ``random_constants`` says whether the graph holds
    random numbers as constants: then it is valid for one call only. ``reads`` are the lines of the model's
    code that read a precision; ``path`` are the values that it read, if the graph is valid for inputs with
    these values only.
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
    custom_functions: tuple[str, ...] = ()
    changes: tuple[StateChange, ...] = ()
    random_constants: bool = False
    reads: tuple[SourceLine, ...] = ()
    custom_backwards: tuple[CustomBackward, ...] = ()
    backward_notes: tuple[str, ...] = ()
    path: tuple[ValueRead, ...] | None = None
    rounded: frozenset[str] = frozenset()

    @property
    def site_of_node(self) -> dict[str, Site]:
        """Sites by node name."""
        return {site.node: site for site in self.sites}
