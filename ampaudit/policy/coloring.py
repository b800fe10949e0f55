"""Colors a graph as TensorFlow's automatic mixed precision does.

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


def color(colors: Sequence[Cast], inputs: Sequence[Sequence[int]]) -> list[bool]:
    """Decide which nodes run in 16 bits, in time linear in nodes plus edges.

    Args:
        colors: the color of each node; any other cast means float32.
        inputs: for each node, the indices of the nodes whose values it takes.
    """
    users = _reversed(inputs)
    nodes = range(len(colors))

    def free(node: int) -> bool:
        return colors[node] in _FREE

    # 1 and 2: deny spreads forward through free nodes that lead to a deny or infer node
    leads = _reached((n for n in nodes if colors[n] in (Cast.DENY, Cast.INFER)), inputs, free)
    denied = _reached((n for n in nodes if colors[n] is Cast.DENY), users, lambda n: free(n) and n in leads)
    low = {n for n in nodes if colors[n] is Cast.ALLOW}

    # 3: free nodes with allow nodes on both sides
    def undecided(node: int) -> bool:
        return free(node) and node not in denied

    below = _reached(low, users, undecided)
    above = _reached(low, inputs, undecided)
    low |= {n for n in below & above if undecided(n)}

    # 4: clear nodes that touch a low node through clear nodes
    def clear(node: int) -> bool:
        return colors[node] is Cast.CLEAR and node not in denied

    both = [[*inputs[n], *users[n]] for n in nodes]
    low |= {n for n in _reached(low, both, clear) if clear(n)}
    return [n in low for n in nodes]


def _reached(
    starts: Iterable[int], edges: Sequence[Collection[int]], passes: Callable[[int], bool]
) -> set[int]:
    """Return the start nodes and every node reachable from them through passing nodes."""
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
