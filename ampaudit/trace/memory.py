"""Which values of a traced graph share memory, read from the fake tensors of the trace.

Schemas do not say it: ``atleast_3d``, ``contiguous`` and ``to`` return their input or a copy, as it comes.
One op differs on fake tensors from what kernels do: a dropout that does nothing returns its input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["SharedMemory"]

_DROPOUT = torch.ops.aten.dropout.default


class SharedMemory:
    """The memories of a graph's values, by number."""

    def __init__(self, graph: fx.Graph) -> None:
        self._same: dict[int, int] = {}
        for node in graph.nodes:
            if node.target is _DROPOUT and not (node.args[2] if len(node.args) > 2 else node.kwargs["train"]):
                self._same[_number(node.meta["val"])] = self._root(_number(node.args[0].meta["val"]))

    def of(self, value: Any) -> frozenset[int]:
        """The memory of a traced value, or those of several."""
        if isinstance(value, torch.Tensor):
            return frozenset((self._root(_number(value)),))
        items = value if isinstance(value, list | tuple) else ()
        return frozenset(self._root(_number(item)) for item in items if isinstance(item, torch.Tensor))

    def _root(self, number: int) -> int:
        while number in self._same:
            number = self._same[number]
        return number


def _number(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
