"""Colours a graph as TensorFlow's automatic mixed precision does.

A node is *allow* (always low), *deny* (dangerous, and so is what is computed from it), *infer* (safe unless
an upstream deny reaches it), *clear* (no numerical effect) or none of them (float32). The steps are those of
``grappler/optimizers/auto_mixed_precision.cc``, commit 219b6ee; its handling of loops and tensor lists has no
counterpart in a traced graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from ampaudit.policy.schema import Cast

__all__ = ["color"]

_FREE = (Cast.INFER, Cast.CLEAR)


def color(colours: Sequence[Cast], inputs: Sequence[Sequence[int]]) -> list[bool]:
    """Which nodes run in 16 bits. Time grows with nodes plus edges.

    Args:
        colours: of each node; anything but a colour stands for float32.
        inputs: indices of the nodes whose values each node takes.
    """
    users = _reversed(inputs)
    nodes = range(len(colours))

    def free(node: int) -> bool:
        return colours[node] in _FREE

    # 1 and 2: deny spreads forward through free nodes that lead to a deny or infer node
    leads = _reached((n for n in nodes if colours[n] in (Cast.DENY, Cast.INFER)), inputs, free)
    denied = _reached((n for n in nodes if colours[n] is Cast.DENY), users, lambda n: free(n) and n in leads)
    low = {n for n in nodes if colours[n] is Cast.ALLOW}

    # 3: free nodes with allow nodes on both sides
    def open_way(node: int) -> bool:
        return free(node) and node not in denied

    below = _reached(low, users, open_way)
    above = _reached(low, inputs, open_way)
    low |= {n for n in below & above if open_way(n)}

    # 4: clear nodes that touch a low node through clear nodes
    def clear(node: int) -> bool:
        return colours[node] is Cast.CLEAR and node not in denied

    both = [[*inputs[n], *users[n]] for n in nodes]
    low |= {n for n in _reached(low, both, clear) if clear(n)}
    return [n in low for n in nodes]


def _reached(
    starts: Iterable[int], edges: Sequence[Collection[int]], passes: Callable[[int], bool]
) -> set[int]:
    """The starts, and every node that a path of passing nodes connects with one."""
    seen = set(starts)
    pending = list(seen)
    while pending:
        for node in edges[pending.pop()]:
            if node not in seen and passes(node):
                seen.add(node)
                pending.append(node)
    return seen


def _reversed(inputs: Sequence[Sequence[int]]) -> list[list[int]]:
    users: list[list[int]] = [[] for _ in inputs]
    for node, sources in enumerate(inputs):
        for source in sources:
            users[source].append(node)
    return users
