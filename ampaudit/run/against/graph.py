"""Describes a graph for a comparison: its ops in order, their operands, and their values."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ampaudit.run.against.values import Values
from ampaudit.run.lockstep import LockStep
from ampaudit.trace.functional import overload_of
from ampaudit.trace.graph import Placeholder, Role, Site, Slot
from ampaudit.trace.opnames import base_name, named_arguments

__all__ = ["ComparedGraph", "Op"]

_TRANSPARENT_ROLES = (Role.VIEW, Role.CAST, Role.INSERTED_CAST, Role.WEIGHT_CAST)
# the same op under several names
_SYNONYMS = {
    "clip": "clamp", "divide": "div", "multiply": "mul", "subtract": "sub", "concat": "cat",
    "concatenate": "cat", "safe_softmax": "softmax", "_softmax": "softmax", "true_divide": "div",
    "mm": "matmul", "bmm": "matmul",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """An op that computes or selects values; views and casts are not ops of their own.

    Attributes:
        place: Position in the graph's order.
        operands: Nodes that it reads.
        sources: The op or placeholder that computed the values of each operand.
    """

    place: int
    node: fx.Node
    site: Site
    base: str
    operands: tuple[fx.Node, ...]
    sources: tuple[fx.Node, ...]

    @property
    def name(self) -> tuple[str, str]:
        """Layer (for ONNX, the node) and kind of the op."""
        return self.site.layer, self.base


class ComparedGraph:
    """The ops of a graph with the values of one FP32 run."""

    def __init__(self, executor: LockStep, values: Values) -> None:
        traced = executor.program.traced
        self.traced = traced
        self.places: dict[str, Placeholder] = {p.node: p for p in traced.placeholders}
        self.masters = executor.converted.masters
        self.values = values.kept
        self.inputs = [n for n in executor.program.inputs if self.places[n.name].slot is Slot.INPUT]
        self.outputs = dict(zip(traced.outputs, executor.program.outputs, strict=True))
        sites = traced.site_of_node
        self._sources: dict[fx.Node, fx.Node] = {}
        self.ops: dict[fx.Node, Op] = {}
        for node in traced.graph.nodes:
            site = sites.get(node.name)
            read = tuple(node.all_input_nodes)
            transparent = node.op == "call_function" and (site is None or site.role in _TRANSPARENT_ROLES)
            self._sources[node] = self._sources[read[0]] if transparent and read else node
            if node.op == "call_function" and site is not None and not transparent:
                sources = tuple(self._sources[n] for n in read)
                self.ops[node] = Op(len(self.ops), node, site, _base(node), read, sources)

    def source(self, node: fx.Node) -> fx.Node:
        """Return the op or placeholder whose values a node has."""
        return self._sources[node]

    @cached_property
    def readers(self) -> dict[fx.Node, list[Op]]:
        """The ops that read an op or placeholder, directly or through views."""
        by_source: defaultdict[fx.Node, list[Op]] = defaultdict(list)
        for op in self.ops.values():
            for source in dict.fromkeys(op.sources):
                by_source[source].append(op)
        return by_source

    @cached_property
    def weights(self) -> dict[fx.Node, torch.Tensor]:
        """The floating-point tensors of the model that an op reads, by placeholder."""
        return {
            node: self.masters[node.name].detach()
            for node in self.traced.graph.find_nodes(op="placeholder")
            if node.users and node.name in self.masters and self.masters[node.name].is_floating_point()
        }

    @cached_property
    def numbers(self) -> frozenset[float]:
        """The numbers that ops are called with."""
        values = (value for op in self.ops.values() for value in self.arguments(op).values())
        return frozenset(value for value in values if isinstance(value, float))

    def is_constant(self, op: Op) -> bool:
        """Return whether an op computes a single number from stored ones."""
        stored = all(source.name in self.masters for source in op.sources)
        return stored and self.values[op.node][0] == 1

    def weight_name(self, node: fx.Node) -> str:
        """Return the name of the parameter, buffer or constant of a placeholder."""
        return self.places[node.name].name

    def arguments(self, op: Op) -> dict[str, Any]:
        """Return the arguments of an op by name, with single stored numbers as numbers."""
        overload = overload_of(op.node.target)
        if overload is None:
            return {}
        arguments = named_arguments(overload, op.node.args, dict(op.node.kwargs))
        return {name: self._number(value) for name, value in arguments.items()}

    def _number(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            tensor = self.masters.get(self.source(value).name)
            if tensor is not None and tensor.numel() == 1:
                return tensor.item()
        return value


def _base(node: fx.Node) -> str:
    overload = overload_of(node.target)
    name = base_name(overload).rstrip("_") if overload is not None else str(node.target)
    return _SYNONYMS.get(name, name)
