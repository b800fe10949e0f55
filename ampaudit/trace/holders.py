"""Opens objects that hold tensors and that torch does not know as containers, such as key-value caches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ampaudit.trace.keys import value_key

__all__ = ["Opened", "holds_objects", "opened", "restored"]

TensorFinder = Callable[[Any], Sequence[tuple[str, torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor in the key of an object."""

    index: int


class _Template:
    """An object without regard to the tensors in it: two are equal if all else in them is."""

    def __init__(self, value: Any, names: tuple[str, ...], tensors: Sequence[torch.Tensor]) -> None:
        self.names = names
        self._value = value
        self._tensors = tuple(tensors)

    @cached_property
    def _key(self) -> Any:
        return value_key(self.filled([_Place(index) for index in range(len(self._tensors))]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Template) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self.names)

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Copy the object with other tensors in it."""
        memo = {id(old): new for old, new in zip(self._tensors, tensors, strict=True)}
        return copy.deepcopy(self._value, memo)


class Opened:
    """The tensors of an object as leaves that torch can flatten; ``template`` makes the object again."""

    def __init__(self, tensors: Sequence[Any], template: _Template) -> None:
        self.tensors = list(tensors)
        self.template = template


class _Attribute(str):
    """A path within an object, as part of the name of a leaf."""

    __slots__ = ()


pytree.register_pytree_node(
    Opened,
    lambda item: (item.tensors, item.template),
    Opened,  # type: ignore[arg-type]
    flatten_with_keys_fn=lambda item: (
        list(zip(map(_Attribute, item.template.names), item.tensors, strict=True)),  # type: ignore[arg-type]
        item.template,
    ),
)


def opened(value: Any, find: TensorFinder) -> Any:
    """Open each object that holds tensors; ``find`` lists an object's tensors with their paths."""

    def open_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf
        tensor_paths = find(leaf)
        if not tensor_paths:
            return leaf
        tensors = [tensor for _, tensor in tensor_paths]
        return Opened(tensors, _Template(leaf, tuple(name for name, _ in tensor_paths), tensors))

    return pytree.tree_map(open_leaf, value)


def restored(value: Any) -> Any:
    """Make the objects again from their leaves."""

    def restore(leaf: Any) -> Any:
        return leaf.template.filled(leaf.tensors) if isinstance(leaf, Opened) else leaf

    return pytree.tree_map(restore, value, is_leaf=lambda leaf: isinstance(leaf, Opened))


def holds_objects(spec: pytree.TreeSpec) -> bool:
    """Return whether a structure has opened objects in it."""
    return spec.type is Opened or any(map(holds_objects, spec.children()))
