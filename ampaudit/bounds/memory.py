"""Which values of a graph share memory that some op writes to.

Whether two values share memory is read from the fake tensors of the trace, not from the schemas of ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.trace.functional import OnCopy, functionalized, writes_in_place
from ampaudit.trace.graph import TracedModel
from ampaudit.trace.opnames import may_write, written_values

__all__ = ["memory_of", "without_visible_writes", "written_memory"]


def memory_of(value: Any) -> set[int]:
    """The memories that a traced value, or each of several, lies in."""
    items = value if isinstance(value, list | tuple) else (value,)
    return {int(item.untyped_storage()._cdata) for item in items if isinstance(item, torch.Tensor)}


def written_memory(graph: fx.Graph, *, in_place: bool = True) -> frozenset[int]:
    """Memory that some op of a graph writes to.

    Args:
        graph: with in-place ops, or with copies for them.
        in_place: whether in-place ops count, or only what is written in other ways (``out=``, statistics).
    """
    found: set[int] = set()
    for node in graph.nodes:
        if isinstance(node.target, OnCopy) or writes_in_place(node):
            found |= memory_of(node.args[0].meta.get("val")) if in_place else set()
        elif isinstance(node.target, OpOverload) and may_write(node.target):
            for written in written_values(node.target, node.args, dict(node.kwargs)):
                found |= memory_of(written.meta.get("val")) if isinstance(written, fx.Node) else set()
    return frozenset(found)


def without_visible_writes(traced: TracedModel) -> TracedModel:
    """The model with its in-place ops replaced, unless nobody would see a difference.

    ``relu_(x)`` on an x that nobody else reads is as good as ``relu(x)``, and needs no copy of the graph.
    """
    return functionalized(traced) if any(_overwritten_reads(traced.graph)) else traced


def _overwritten_reads(graph: fx.Graph) -> Iterator[bool]:
    """For each in-place op, whether a value from before it is read after it."""
    order = {node: index for index, node in enumerate(graph.nodes)}
    writes = [node for node in graph.nodes if writes_in_place(node)]
    if not writes:
        return
    values: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for memory in memory_of(node.meta.get("val")):
            values[memory].append(node)
    for write in writes:
        for memory in memory_of(write.args[0].meta.get("val")):
            earlier = [node for node in values[memory] if order[node] < order[write]]
            yield any(order[user] > order[write] for node in earlier for user in node.users)
