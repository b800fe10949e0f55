"""Reads autograd's own graph of a trace: what the loss's gradient reaches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

__all__ = ["Tracked", "reached_outputs"]


def reached_outputs(loss: torch.Tensor) -> dict[int, frozenset[int]]:
    """For each node behind a value, by identity, which of its outputs get a gradient."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for node in _behind(loss):
        for following, index in node.next_functions:
            if following is not None:
                found[id(following)].add(index)
    if loss.grad_fn is not None:
        found[id(loss.grad_fn)].add(loss.output_nr)
    return {key: frozenset(indices) for key, indices in found.items()}


def _behind(*values: torch.Tensor) -> list[Any]:
    """Every node of autograd's graph behind some values; it is alive as long as the list is."""
    waiting: list[Any] = [value.grad_fn for value in values if value.grad_fn is not None]
    seen: dict[int, Any] = {}
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            waiting += [following for following, _ in node.next_functions if following is not None]
    return list(seen.values())


class Tracked:
    """Tells which value of a trace a tensor is that autograd hands out: one object more for the same memory.

    Args:
        tensors: the values of the trace; a mapping, of which tensors are the keys.
    """

    def __init__(self, tensors: Mapping[torch.Tensor, Any]) -> None:
        self._tensors = tensors
        self._known: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        """Arguments of an op, with values of the trace in the place of tensors that it does not know."""
        return pytree.tree_map_only(torch.Tensor, self._value, value)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor in self._tensors or not isinstance(tensor, FakeTensor):
            return tensor
        if _memory(tensor) not in self._known:
            self._known = {_memory(known): known for known in self._tensors}
        return self._known.get(_memory(tensor), tensor)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    where = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *where, tuple(tensor.shape), tensor.stride(), tensor.dtype
