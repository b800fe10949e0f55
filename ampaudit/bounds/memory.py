"""Which values of a graph lie in memory that some op writes to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import fx
from torch._ops import OpOverload

from ampaudit.trace.functional import OnCopy, functionalized, writes_in_place
from ampaudit.trace.graph import TracedModel
from ampaudit.trace.memory import SharedMemory
from ampaudit.trace.opnames import may_write, written_values

__all__ = ["without_visible_writes", "written_memory"]


def written_memory(graph: fx.Graph, memory: SharedMemory, *, in_place: bool = True) -> frozenset[int]:
    """Memory that some op of a graph writes to.

    Args:
        graph: with in-place ops, or with copies for them.
        memory: of its values.
        in_place: whether in-place ops count, or only what is written in other ways (``out=``, statistics).
    """
    found: set[int] = set()
    for node in graph.nodes:
        if isinstance(node.target, OnCopy) or writes_in_place(node):
            found |= memory.of(node.args[0].meta.get("val")) if in_place else set()
        elif isinstance(node.target, OpOverload) and may_write(node.target):
            for written in written_values(node.target, node.args, dict(node.kwargs)):
                found |= memory.of(written.meta.get("val")) if isinstance(written, fx.Node) else set()
    return frozenset(found)


def without_visible_writes(traced: TracedModel, memory: SharedMemory) -> TracedModel:
    """The model with its in-place ops replaced, unless nobody would see a difference.

    ``relu_(x)`` on an x that nobody else reads is as good as ``relu(x)``, and needs no copy of the graph.
    """
    return functionalized(traced) if any(_overwritten_reads(traced.graph, memory)) else traced


def _overwritten_reads(graph: fx.Graph, memory: SharedMemory) -> Iterator[bool]:
    """For each in-place op, whether a value from before it is read after it."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    writes = [node for node in graph.nodes if writes_in_place(node)]
    if not writes:
        return
    values: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for number in memory.of(node.meta.get("val")):
            values[number].append(node)
    for write in writes:
        for number in memory.of(write.args[0].meta.get("val")):
            earlier = [node for node in values[number] if order[node] < order[write]]
            yield any(order[user] > order[write] for node in earlier for user in node.users)
