"""Chooses a type for every node, so that as few values as possible are cast.

What the audit decided is fixed. Nodes that only move values may have either type; so may nodes that
compute constants. Choosing theirs with the fewest casts, one per value and direction, is a minimum cut:
a node on the source's side is in float32, one on the sink's in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ampaudit.export.onnx.types import MOVING, NodeTypes, SlotType, is_float32, node_types
from ampaudit.source.onnx.names import bodies_of, plain_domain

if TYPE_CHECKING:
    import networkx as nx
    import onnx_ir as ir

__all__ = ["Regions", "choose_types"]

_FLOAT32, _LOW = "float32", "low"  # source and sink; no node of a graph is text
_CAST, _WIDE = 1000, 1  # a cast is worse than any number of moves in float32


@dataclass(slots=True)
class Regions:
    """The chosen types.

    Attributes:
        types: Types of every node's inputs and outputs.
        wide: Nodes that work in float32.
    """

    types: dict[ir.Node, NodeTypes] = field(default_factory=dict)
    wide: set[ir.Node] = field(default_factory=set)

    def is_low(self, node: ir.Node) -> bool:
        """Return whether a node works in 16 bits."""
        return node in self.types and node not in self.wide

    def slot_is_low(self, node: ir.Node, slot: SlotType) -> bool | None:
        """Return whether an input or output is in 16 bits; ``None`` if it takes either."""
        if slot is SlotType.ANY:
            return None
        return slot is SlotType.CHOSEN and self.is_low(node)


def choose_types(
    graph: ir.Graph, decisions: Mapping[ir.Node, bool], versions: Mapping[str, int], low: str, *, low_io: bool
) -> Regions:
    """Choose a type for each node of a graph and of the bodies inside it.

    Args:
        graph: with the type of every value.
        decisions: whether a node stays in float32, for those that the audit saw.
        versions: of the operator sets.
        low: the 16-bit format.
        low_io: whether the graph takes and returns 16-bit values.
    """
    import networkx as nx

    flow, regions = nx.DiGraph(), Regions()
    planner = _Planner(flow, regions, decisions, versions, low)
    planner.add_graph(graph, _LOW if low_io else _FLOAT32)
    if planner.free:
        _, (wide, _) = nx.minimum_cut(flow, _FLOAT32, _LOW)
        planner.fixed_wide |= {node for node in planner.free if node in wide}
    regions.wide = planner.fixed_wide
    return regions


class _Planner:
    """Builder of the flow network: nodes, and the cost of casting each value."""

    def __init__(
        self,
        flow: nx.DiGraph,
        regions: Regions,
        decisions: Mapping[ir.Node, bool],
        versions: Mapping[str, int],
        low: str,
    ) -> None:
        self._flow = flow
        self._regions = regions
        self._decisions = decisions
        self._versions = versions
        self._low = low
        self.free: list[ir.Node] = []
        self.fixed_wide: set[ir.Node] = set()
        flow.add_nodes_from((_FLOAT32, _LOW))

    def add_graph(self, graph: ir.Graph, border: Any) -> None:
        """Add the nodes of a graph, whose inputs and outputs have the type of ``border``."""
        for node in graph:
            self._add_node(node)
            for body in bodies_of(node):
                self.add_graph(body, node)
        values = [(value, border) for value in graph.inputs]
        values += [(value, node) for node in graph for value in node.outputs if node.op_type != "Constant"]
        outputs = set(graph.outputs)
        for value, producer in values:
            if is_float32(value):
                users = [*self._users(value), *([border] if value in outputs else [])]
                self._add_value(value, self._producer(producer, value), users)

    def _add_node(self, node: ir.Node) -> None:
        domain = plain_domain(node.domain)
        version = node.version or self._versions.get(domain, 1)
        types = node_types(node, version, self._low)
        self._regions.types[node] = types
        self._flow.add_node(node)
        moves = node.op_type in MOVING and domain == ""
        decided = self._decisions.get(node)
        if not types.takes_low or decided is True or (decided is None and not self._is_free(node)):
            self.fixed_wide.add(node)
            self._flow.add_edge(_FLOAT32, node, capacity=float("inf"))
        elif decided is None or moves or node.op_type == "Cast":
            self.free.append(node)
            self._flow.add_edge(node, _LOW, capacity=_WIDE)
        else:
            self._flow.add_edge(node, _LOW, capacity=float("inf"))

    def _is_free(self, node: ir.Node) -> bool:
        """Return whether a node without an audited op may have either type."""
        moves = node.op_type in MOVING or node.op_type in ("Loop", "Scan", "Cast")
        constant = not bodies_of(node) and all(v is None or v.is_initializer() for v in node.inputs)
        return moves or constant or not any(map(is_float32, (*node.inputs, *node.outputs)))

    def _producer(self, producer: Any, value: ir.Value) -> Any:
        """Return the node whose type a value has; for one that is always float32, the source."""
        node = value.producer()
        if producer in (_FLOAT32, _LOW) or node is None or node is not producer:
            return producer
        slot = self._regions.types[node].outputs[value.index() or 0]
        return _FLOAT32 if slot is SlotType.FLOAT32 else producer

    def _users(self, value: ir.Value) -> Iterator[Any]:
        for use in value.uses():
            node = use.node
            assert node is not None
            slot = self._regions.types[node].inputs[use.idx]
            if slot is not SlotType.ANY:
                yield _FLOAT32 if slot is SlotType.FLOAT32 else node

    def _add_value(self, value: ir.Value, producer: Any, users: list[Any]) -> None:
        """Make a cast cost the same however many users read it."""
        others = [user for user in dict.fromkeys(users) if user is not producer]
        if not others:
            return
        down, up = (value, "down"), (value, "up")
        self._flow.add_edge(producer, down, capacity=_CAST)
        self._flow.add_edge(up, producer, capacity=_CAST)
        for user in others:
            self._flow.add_edge(down, user, capacity=float("inf"))
            self._flow.add_edge(user, up, capacity=float("inf"))
