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
        node: The placeholder's node name.
        slot: The kind of value.
        name: The parameter's or buffer's path, the constant's name, or ``input[i]``.
        dtype: Dtype in the converted model (of weights: the stored one).
    """

    node: str
    slot: Slot
    name: str
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True)
class Site:
    """One op of one layer.

    Attributes:
        id: Id that is stable across runs: layer path, op name and, from the second op on, a number.
        node: Name of the node in the graph.
        layer: Path of the module; empty for the top module.
        layer_type: Class name of the module; for an ONNX node, its operator and, if known, its module.
        op: Name of the ATen op, such as ``aten.linear.default``.
        role: What the op does to its input.
        dtype: Dtype of the (first floating-point) output; ``None`` without output.
        shape: Shape of that output.
        decision: The policy's decision and its reason.
        source: Line of the model's code.
        caller: The user's line that calls it, if that is another one.
        weight: Name of the parameter, buffer or constant, for a weight cast.
        facts: Facts on which the decision is based; ``None`` for sites that the policy or the tracer added.
        original_args: FP32 values of the arguments that the policy changed, by position or name.
        twin: The call of a custom op whose twin contains the op.
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
        function: The function's class.
        args: Its arguments, with ``None`` in place of each tensor.
        tensors: Positions of the tensors among the arguments.
        outputs: Positions of the outputs that require a gradient.
    """

    function: Any
    args: tuple[Any, ...]
    tensors: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CustomBackward:
    """The backward of one call of a custom autograd function, or the hooks of one tensor.

    Attributes:
        number: Number in the graph's marks.
        name: Name for messages, such as ``Scale.backward``.
        layer: Path of the layer that called the function or registered the hook.
        source: The line that defines the backward, or the line that could not be traced.
        failure: Why it could not be traced; ``None`` if it was.
        call: The function call to repeat, if it can be repeated as a whole.
        traced: Its graph, separated from the model's. The outputs are the gradients it returns, then those of
            leaves, then values that other custom backwards read.
        inputs: Origin of each graph input: ``gradient`` and the output's number, ``value`` and its index in
            the saved values, or ``shared`` and a name.
        returns: For each input of the function the index of its gradient; ``None`` for no gradient.
        leaves: Indices, among the saved values, of leaves whose gradient the backward itself sets.
        shares: Names of the remaining outputs.
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
