"""Which values may share memory with one that is written in place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ampaudit.run.step import Step
from ampaudit.trace.graph import Role
from ampaudit.trace.values import SharedMemory

__all__ = ["written_nodes"]


def written_nodes(steps: Sequence[Step]) -> frozenset[fx.Node]:
    """Every node in the same group as a written one; groups join what may share memory."""
    parent: dict[fx.Node, fx.Node] = {}

    def root(node: fx.Node) -> fx.Node:
        while parent.setdefault(node, node) is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    written: list[fx.Node] = []
    if not any(map(_targets, steps)):
        return frozenset()
    memory = SharedMemory(steps[0].node.graph)
    for step in steps:
        root(step.node)
        own = memory.of(step.node.meta.get("val"))
        for source in step.node.all_input_nodes:
            root(source)
            # an op that is no view by its schema may be one all the same, such as atleast_3d
            if not own.isdisjoint(memory.of(source.meta.get("val"))):
                parent[root(step.node)] = root(source)
        # views share memory by definition; a cast returns its own input where the dtypes agree, and in the
        # float32 reference they always do; lists of views are taken apart by nodes that are no site
        if step.site is None or step.site.role is Role.VIEW or step.site.role.converts:
            for source in step.node.all_input_nodes[:1]:
                parent[root(step.node)] = root(source)
        for target in _targets(step):
            parent[root(step.node)] = root(target)
            written.append(target)
    roots = {root(node) for node in written}
    return frozenset(node for node in list(parent) if root(node) in roots)


def _targets(step: Step) -> list[fx.Node]:
    """The nodes that a step writes to."""
    found = step.written(step.node.args, dict(step.node.kwargs))
    return [value for value in found if isinstance(value, fx.Node)]
