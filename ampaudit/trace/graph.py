"""Defines the traced model as a value: one flat graph, its sites in order, and its tensors."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.core.ops import having
from ampaudit.core.sites import SiteId, SiteNumbering, SourceLine
from ampaudit.policy import Decision, OpFacts
from ampaudit.policy.schema import Cast, Constants
from ampaudit.trace.entry import OutputStructure, layer_of
from ampaudit.trace.flatten import ObjectSource, is_mark
from ampaudit.trace.opnames import CAST_OPS, base_name, is_view, selects, written_values
from ampaudit.trace.path.reads import ValueRead
from ampaudit.trace.replay import META_KEY, MODULE_SCOPE, OpRecord
from ampaudit.trace.stack import source_lines
from ampaudit.trace.state import StateChange
from ampaudit.trace.twins import TwinCall
from ampaudit.trace.values import float_value, sizes_of, tensors_in

_UNSEEN = Decision(Cast.FOLLOW, None, "default", "made by the tracer")


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
    """One input of the graph."""

    node: str  # the placeholder's node name
    slot: Slot
    name: str  # the parameter's or buffer's path, the constant's name, or the input's name
    dtype: torch.dtype | None  # in the converted model (of weights: the stored one)

    @property
    def is_float(self) -> bool:
        """Whether it holds floating-point or complex numbers."""
        return self.dtype is not None and (self.dtype.is_floating_point or self.dtype.is_complex)


@dataclass(frozen=True, slots=True)
class Site:
    """One op of one layer."""

    id: SiteId  # stable across runs: layer path, op name and, from the second op on, a number
    node: str  # name of the node in the graph
    layer: str  # path of the module; empty for the top module
    layer_type: str  # class name of the module; for an ONNX node, its operator and, if known, its module
    op: str  # ATen name, such as ``aten.linear.default``
    role: Role  # what the op does to its input
    dtype: torch.dtype | None  # of the (first floating-point) output; ``None`` without output
    shape: tuple[int, ...]  # of that output
    decision: Decision  # the policy's decision and its reason
    source: SourceLine | None  # line of the model's code
    caller: SourceLine | None  # the user's line that calls it, if that is another one
    weight: str | None = None  # name of the parameter, buffer or constant, for a weight cast
    # facts on which the decision is based; ``None`` for sites that the policy or the tracer added
    facts: OpFacts | None = None
    # FP32 values of the arguments that the policy changed, by position or name
    original_args: Mapping[int | str, Any] = field(default_factory=dict)
    twin: TwinCall | None = None  # the call of a custom op whose twin contains the op


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a custom autograd function, repeatable on other tensors."""

    function: Any  # the function's class
    args: tuple[Any, ...]  # its arguments, with ``None`` in place of each tensor
    tensors: tuple[int, ...]  # positions of the tensors among the arguments
    outputs: tuple[int, ...]  # positions of the outputs that require a gradient


@dataclass(frozen=True, slots=True)
class CustomBackward:
    """The backward of one call of a custom autograd function, or the hooks of one tensor."""

    number: int  # in the graph's marks
    name: str  # in messages, such as ``Scale.backward``
    layer: str  # path of the layer that called the function or registered the hook
    source: SourceLine | None  # the line that defines the backward, or the line that could not be traced
    failure: str | None  # why it could not be traced; ``None`` if it was
    call: FunctionCall | None  # the function call to repeat, if it can be repeated as a whole
    # its graph, separated from the model's; the outputs are the gradients it returns, then those of leaves,
    # then values that other custom backwards read
    traced: TracedModel | None = None
    # origin of each graph input: ``gradient`` and the output's number, ``value`` and its index in the saved
    # values, or ``shared`` and a name
    inputs: tuple[tuple[str, int | str], ...] = ()
    # for each input of the function the index of its gradient; ``None`` for no gradient
    returns: tuple[int | None, ...] = ()
    # indices, among the saved values, of leaves whose gradient the backward itself sets
    leaves: tuple[int, ...] = ()
    shares: tuple[str, ...] = ()  # names of the remaining outputs


@dataclass(frozen=True, slots=True)
class TracedModel:
    """A flat FX graph of ATen ops with the policy's casts, before decomposition."""

    graph: fx.Graph
    placeholders: tuple[Placeholder, ...]
    tensors: dict[str, torch.Tensor]  # the model's own FP32 tensors (never copies), by placeholder
    sites: tuple[Site, ...]
    outputs: tuple[str, ...]
    signature: tuple[Any, ...]  # shapes and dtypes that the graph is valid for
    policy: str
    dtype: torch.dtype
    notes: tuple[str, ...]
    clip: Constants | None = None  # what the policy does to weights that do not fit
    split_ties: tuple[tuple[str, ...], ...] = ()  # tied weights that it would store differently by name
    structure: OutputStructure | None = None  # of the outputs
    # every path in the model's output, with the number of its tensor, which may have several
    paths: Mapping[str, int] = field(default_factory=dict)
    # custom autograd functions, whose backward is not in the graph, and ``checkpoint`` if it recomputes
    custom_functions: tuple[str, ...] = ()
    changes: tuple[StateChange, ...] = ()  # of the model's Python state
    random_constants: bool = False  # whether it holds random numbers, and so is valid for one call only
    reads: tuple[SourceLine, ...] = ()  # lines of the model's code that read a precision
    custom_backwards: tuple[CustomBackward, ...] = ()  # where gradients were asked for
    backward_notes: tuple[str, ...] = ()  # what the custom backwards leave out
    path: tuple[ValueRead, ...] | None = None  # values that the code read; the graph is valid for these only
    rounded: frozenset[str] = frozenset()  # tensors stored in 16 bits, although the code sees float32

    @property
    def site_of_node(self) -> dict[str, Site]:
        """Sites by node name."""
        return {site.node: site for site in self.sites}


def build_sites(graph: fx.Graph, placeholders: Sequence[Placeholder]) -> tuple[Site, ...]:
    """Return one site per ATen op in graph order, including ops on shapes and indices."""
    numbering = SiteNumbering(getattr(node.meta.get(META_KEY), "site", None) for node in graph.nodes)
    weights = {p.node: p for p in placeholders if p.slot is not Slot.INPUT}
    sites: list[Site] = []
    for node in graph.nodes:
        computes = node.target is not operator.getitem and not isinstance(node.target, ObjectSource)
        prim = isinstance(node.target, OpOverload) and node.target.namespace == "prim"
        if node.op == "call_function" and computes and not is_mark(node.target) and not prim:
            sites.append(_site(node, weights, numbering))
    return tuple(sites)


def _site(node: fx.Node, weights: dict[str, Placeholder], numbering: SiteNumbering) -> Site:
    record: OpRecord | None = node.meta.get(META_KEY)
    first = node.args[0] if node.args else None
    weight = weights.get(first.name) if isinstance(first, fx.Node) else None
    meta = record.replayed if record is not None and record.replayed is not None else node.meta
    layer, layer_type = layer_of(meta.get("nn_module_stack") or {})
    if scope := meta.get(MODULE_SCOPE):
        layer_type = f"{layer_type} of {scope}"
    if weight is not None and record is not None and record.inserted and "." in weight.name:
        layer = weight.name.rsplit(".", 1)[0]
    name = str(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", "?")
    short = name.removeprefix("aten.").split(".")[0]
    role = _role(node, record, weight)
    if role is Role.WEIGHT_CAST and weight is not None:
        short = f"cast({weight.name.rsplit('.', 1)[-1]})"
    elif role is Role.INSERTED_CAST:
        short = "cast"
    site_id = record.site if record is not None and role is not Role.WEIGHT_CAST else None
    results = results_of(node)
    value = float_value(results)
    if value is None:
        value = next((tensor for tensor in tensors_in(results) if tensor.is_complex()), None)
    source, caller = source_lines(meta.get("stack_trace"))
    if record is not None and record.twin is not None:
        caller = record.twin.called_at
    return Site(
        id=site_id or numbering.next_id(layer, short),
        node=node.name,
        layer=layer,
        layer_type=layer_type,
        op=name,
        role=role,
        dtype=value.dtype if value is not None else None,
        shape=sizes_of(value),
        decision=record.decision if record else _UNSEEN,
        source=source,
        caller=caller,
        weight=weight.name if role is Role.WEIGHT_CAST and weight else None,
        facts=record.facts if record else None,
        original_args=record.original_args if record else {},
        twin=record.twin if record else None,
    )


def results_of(node: fx.Node) -> Any:
    """Return the (fake) results of a node: those that its op returns or, if none, those that it writes."""
    if not isinstance(node.target, OpOverload) or node.target._schema.returns:
        return node.meta.get("val")
    values = written_values(node.target, node.args, dict(node.kwargs))
    return [value.meta.get("val") for value in values if isinstance(value, fx.Node)]


def _role(node: fx.Node, record: OpRecord | None, weight: Placeholder | None) -> Role:
    if not isinstance(node.target, OpOverload):
        return Role.COMPUTE
    if base_name(node.target) in CAST_OPS:
        if weight is not None:
            return Role.WEIGHT_CAST
        return Role.INSERTED_CAST if record and record.inserted else Role.CAST
    if is_view(node.target) or is_idle_dropout(node):
        return Role.VIEW
    output = float_value(node.meta.get("val"))
    if output is None or not selects(node.target):
        return Role.COMPUTE
    values = (float_value(source.meta.get("val")) for source in node.all_input_nodes)
    casts = any(v is not None and v.dtype != output.dtype for v in values)  # as a ``cat`` of two dtypes does
    return Role.COMPUTE if casts else Role.SELECT


def is_idle_dropout(node: fx.Node) -> bool:
    """Return whether a node is a dropout outside training, which returns its input."""
    train = node.args[2] if len(node.args) > 2 else node.kwargs.get("train")
    is_dropout = isinstance(node.target, OpOverload) and base_name(node.target) in having("dropout")
    return is_dropout and train is False
