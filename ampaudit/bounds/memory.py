"""Finds the values of a graph whose memory some op writes to."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx
from torch._ops import OpOverload

from ampaudit.trace.functional import OnCopy, functionalized, overload_of, writes_in_place
from ampaudit.trace.graph import TracedModel
from ampaudit.trace.opnames import base_name, may_write, written_values
from ampaudit.trace.values import SharedMemory

_RESIZING = ("resize_", "resize_as_", "set_")  # what a view of such memory shows afterwards is not known

__all__ = ["without_visible_writes", "written_memory"]


def written_memory(graph: fx.Graph, memory: SharedMemory) -> tuple[frozenset[int], frozenset[int]]:
    """Return the memory that some op of a graph writes to.

    Args:
        graph: with in-place ops, or with copies for them.
        memory: of its values.

    Returns:
        What in-place ops write to, and what is written in other ways (``out=``, statistics of a norm).
    """
    in_place: set[int] = set()
    hidden: set[int] = set()
    for node in graph.nodes:
        op = overload_of(node.target)
        if op is not None and base_name(op) in _RESIZING:
            hidden |= memory.of(node.args[0].meta.get("val"))
        elif isinstance(node.target, OnCopy) or writes_in_place(node):
            in_place |= memory.of(node.args[0].meta.get("val"))
        elif isinstance(node.target, OpOverload) and may_write(node.target):
            for written in written_values(node.target, node.args, dict(node.kwargs)):
                hidden |= memory.of(written.meta.get("val")) if isinstance(written, fx.Node) else set()
    return frozenset(in_place), frozenset(hidden)


def without_visible_writes(traced: TracedModel, memory: SharedMemory) -> TracedModel:
    """Replace the model's in-place ops, unless that makes no visible difference.

    ``relu_(x)`` on an x without other readers is as good as ``relu(x)``, and needs no copy of the graph.
    """
    return functionalized(traced) if any(_overwritten_reads(traced.graph, memory)) else traced


def _overwritten_reads(graph: fx.Graph, memory: SharedMemory) -> Iterator[bool]:
    """For each in-place op, return whether an earlier value is read after it."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    writes = [node for node in graph.nodes if writes_in_place(node)]
    if not writes:
        return
    places = {write: memory.of(write.args[0].meta.get("val")) for write in writes}
    written = frozenset().union(*places.values())
    values = [(node, found) for node in graph.nodes if (found := memory.of(node.meta.get("val")) & written)]
    for write, place in places.items():
        earlier = [node for node, found in values if found & place and order[node] < order[write]]
        yield any(order[user] > order[write] for node in earlier for user in node.users)
