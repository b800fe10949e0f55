"""Which values of a graph share memory that somebody writes to, so that a proof must not speak of them."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx
from torch._ops import OpOverload

from ampaudit.trace.opnames import base_name, is_view, mutated_arguments, written_values

__all__ = ["overwritten"]


def overwritten(graph: fx.Graph) -> Iterator[fx.Node]:
    """Values that are read after somebody wrote into their memory, or whose memory others share.

    ``relu_(x)`` on an x that nobody else reads is as good as ``relu(x)``.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, OpOverload):
            continue
        for written in written_values(target, node.args, dict(node.kwargs)):
            if not isinstance(written, fx.Node):
                continue
            later = any(order[user] > order[node] for user in written.users)
            shared = written.op == "placeholder" or any(map(_shows, (written, *written.users)))
            if later or shared:
                yield from _family(written)


def _shows(node: fx.Node) -> bool:
    """Whether a node may share memory with its input."""
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    return is_view(node.target) or base_name(node.target) in (
        "contiguous",
        "reshape",
        "dropout",
        "to",
        "flatten",
    )


def _family(node: fx.Node) -> set[fx.Node]:
    """Everything that may share memory with a value, through views in either direction."""
    found, frontier = {node}, [node]
    while frontier:
        current = frontier.pop()
        sources = current.all_input_nodes[:1] if _shows(current) or _writes(current) else []
        near = [*sources, *(user for user in current.users if _shows(user) or _writes(user))]
        for other in near:
            if other not in found:
                found.add(other)
                frontier.append(other)
    return found


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and bool(mutated_arguments(node.target))
