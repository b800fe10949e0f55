"""Determines which values of a program may be in 16 bits or in float32, and which ops read them."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch
from torch import fx

from ampaudit.policy.schema import Cast
from ampaudit.run.lockstep import LockStep
from ampaudit.run.program import Step
from ampaudit.trace.caster import TWIN
from ampaudit.trace.functional import OnCopy
from ampaudit.trace.graph import Role, Site, Slot
from ampaudit.trace.values import LOW_PRECISION_DTYPES, float_value

__all__ = ["PrecisionGraph", "PrecisionValue", "ValueKind", "ValueNames", "values_of"]

# dtypes of results that stay wide although 16 bits were requested, of ops that write to float32 statistics
_FLOAT32 = frozenset({torch.float32, torch.complex64})
_FIXED = ("author", TWIN)  # reasons of decisions that no policy makes


class ValueKind(StrEnum):
    """The reason for the precision of a value."""

    OP = "op"  # a rule about its op
    WEIGHT = "weight"  # how it is stored
    FOLLOW = "follow"  # its inputs: float32 if one of them is, as for x.to(y.dtype)
    FLOAT32 = "float32"  # always float32: an input of the model, or an op without a 16-bit kernel
    LOW = "low"  # always 16 bits: an input in 16 bits, or a cast in the model's code


@dataclass(frozen=True, slots=True)
class PrecisionValue:
    """A computed value, a weight or an input.

    Attributes:
        name: The site's id, or the name of the weight or input.
        kind: Reason for its precision.
        low: Whether it is in 16 bits as traced.
        site: The site that computes it, if any.
        is_weight: Whether it is a parameter, a buffer or a constant.
    """

    name: str
    kind: ValueKind
    low: bool
    site: Site | None = None
    is_weight: bool = False

    @property
    def free(self) -> bool:
        """Whether a policy may choose its precision."""
        return self.kind in (ValueKind.OP, ValueKind.WEIGHT)

    @property
    def converts(self) -> bool:
        """Whether it is a cast in the model's code."""
        return self.site is not None and self.site.role is Role.CAST


@dataclass(slots=True)
class PrecisionGraph:
    """The values of a model in graph order, and what each op reads, by name."""

    values: dict[str, PrecisionValue] = field(default_factory=dict)
    reads: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def merge(self, other: PrecisionGraph) -> None:
        """Add the values and reads of another graph of the model."""
        for name, value in other.values.items():
            self.values.setdefault(name, value)
        for name, sources in other.reads.items():
            self.reads[name] = tuple(dict.fromkeys((*self.reads.get(name, ()), *sources)))

    def keep_low(self, casts: Collection[str]) -> None:
        """Mark casts in the model's code as casts to 16 bits, whatever their input."""
        for name in casts:
            if name in self.values:
                self.values[name] = replace(self.values[name], kind=ValueKind.LOW)

    def readers(self) -> Iterator[tuple[PrecisionValue, PrecisionValue]]:
        """Yield each pair of a value and an op that reads it."""
        for name, sources in self.reads.items():
            for source in sources:
                yield self.values[source], self.values[name]

    def in_float32(self, chosen: Collection[str]) -> frozenset[str]:
        """Return all values that are in float32 if these ops and weights are."""
        wide: set[str] = set()
        for name, value in self.values.items():
            follows = value.kind is ValueKind.FOLLOW and any(
                source in wide for source in self.reads.get(name, ())
            )
            if follows or value.kind is ValueKind.FLOAT32 or (value.free and name in chosen):
                wide.add(name)
        return frozenset(wide)


@dataclass(frozen=True, slots=True)
class ValueNames:
    """The values of one program.

    Attributes:
        graph: Values by name.
        of: Name of each node's value; views, tuple items, and lossless casts have another node's value.
        producers: Nodes with a value of their own.
        sources: Nodes of floating-point values among the arguments of each producer.
    """

    graph: PrecisionGraph
    of: dict[fx.Node, str]
    producers: frozenset[fx.Node]
    sources: dict[fx.Node, tuple[fx.Node, ...]]


def values_of(executor: LockStep) -> ValueNames:
    """Return the values of a program."""
    program = executor.program
    graph, of = PrecisionGraph(), dict[fx.Node, str]()
    producers, sources = set[fx.Node](), dict[fx.Node, tuple[fx.Node, ...]]()
    places = {place.node: place for place in program.traced.placeholders}

    def add(node: fx.Node, value: PrecisionValue) -> None:
        graph.values[value.name] = value
        of[node] = value.name
        producers.add(node)

    for node in filter(_is_float, program.inputs):
        place = places[node.name]
        low = place.dtype in LOW_PRECISION_DTYPES
        stored = place.slot is not Slot.INPUT and (
            node.name in executor.converted.copies or place.name in program.traced.rounded
        )
        kind = ValueKind.WEIGHT if stored else ValueKind.LOW if low else ValueKind.FLOAT32
        add(node, PrecisionValue(place.name, kind, low, is_weight=place.slot is not Slot.INPUT))
    for step in program.steps:
        node = step.node
        if node.target is operator.getitem or _keeps_value(step):
            if node.all_input_nodes[0] in of:
                of[node] = of[node.all_input_nodes[0]]
            continue
        inputs = tuple(source for source in node.all_input_nodes if source in of)
        if inputs or _is_float(node):
            name = step.site.id if step.site is not None else node.name
            add(node, PrecisionValue(name, _kind(step), step.low_precision, step.site))
            sources[node] = inputs
            # an in-place op has the precision of the tensor that it writes to, whatever else it reads
            deciding = inputs[:1] if _in_place(step) else inputs
            graph.reads[name] = tuple(dict.fromkeys(of[source] for source in deciding))
    return ValueNames(graph, of, frozenset(producers), sources)


def _kind(step: Step) -> ValueKind:
    site = step.site
    if site is None or _in_place(step):
        return ValueKind.FOLLOW
    decision = site.decision
    if decision.cast is Cast.LOWER and not step.low_precision and not _FLOAT32.isdisjoint(step.dtypes):
        return ValueKind.FLOAT32
    if decision.cast is Cast.LOWER and site.facts is not None and decision.reason not in _FIXED:
        return ValueKind.OP
    wide = decision.cast in (Cast.FORBID, Cast.FLOAT32) and not step.low_precision
    return ValueKind.FLOAT32 if wide else ValueKind.FOLLOW


def _in_place(step: Step) -> bool:
    return step.in_place or isinstance(step.node.target, OnCopy)


def _keeps_value(step: Step) -> bool:
    """Return whether an op keeps its input's value: a view, or a lossless cast."""
    if step.site is None or not step.node.all_input_nodes or step.node.target is torch.ops.aten.view.dtype:
        return False
    role = step.site.role
    return role is Role.VIEW or role.inserted or (role is Role.CAST and not step.low_precision)


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return float_value(value) is not None or (isinstance(value, torch.Tensor) and value.is_complex())
