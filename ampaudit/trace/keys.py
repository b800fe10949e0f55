"""Decides which calls of a model can share a trace."""

from __future__ import annotations

import collections
import enum
import types
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.trace.state import PythonState

__all__ = ["TraceCache", "call_key", "value_key"]

Traced = TypeVar("Traced")

_MAX_TRACES = 8  # traces per key: those of the states seen last

_VALUES = (types.NoneType, bool, int, complex, str, bytes, type, enum.Enum, torch.dtype, torch.device)


class _Identity:
    """Compares an object by identity, and keeps it alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key of everything that a trace depends on: all of a call except its tensors' values.

    Two calls with equal keys run the same code if the model is in the same state. Tensors inside objects
    that torch does not look into are compared by identity: a trace takes them for constants. A Python
    iterator equals nothing: its position cannot be read.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    first: dict[int, int] = {}
    keys: list[Any] = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and (leaf.is_nested or leaf.layout is not torch.strided):
            keys.append(_Identity(leaf))  # no trace can follow it
        elif isinstance(leaf, torch.Tensor):
            same = first.setdefault(id(leaf), number)
            keys.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device, same))
        else:
            keys.append(value_key(leaf))
    return (spec, *keys)


def value_key(value: Any) -> Any:
    """Return a key that is equal for values with which code does the same."""
    return _value_key(value, {})


def _value_key(value: Any, visited: dict[int, int]) -> Any:
    if isinstance(value, _VALUES):
        return type(value), value
    if isinstance(value, float):
        return float, value.hex()  # -0.0 is not 0.0, and NaN is NaN
    if id(value) in visited:
        return "seen", visited[id(value)]
    visited[id(value)] = len(visited)
    if isinstance(value, torch.Tensor):
        return _Identity(value), value._version
    if isinstance(value, np.ndarray):
        return np.ndarray, value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return type(value), tuple((_value_key(k, visited), _value_key(v, visited)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(_value_key(item, visited) for item in value)
    if isinstance(value, list | tuple | collections.deque):
        return type(value), tuple(_value_key(item, visited) for item in value)
    if isinstance(value, collections.abc.Iterator):
        return object()
    return _object_key(value, visited)


def _object_key(value: Any, visited: dict[int, int]) -> Any:
    """Compare a plain object by its class and attributes, others by their own equality."""
    attributes = getattr(value, "__dict__", None)
    if isinstance(value, nn.Module | types.FunctionType | types.MethodType | types.ModuleType):
        return _Identity(value)
    if isinstance(attributes, dict):
        return type(value), _value_key(attributes, visited)
    if isinstance(value, collections.abc.Hashable):
        return type(value), value
    return _Identity(value)


class TraceCache(Generic[Traced]):
    """Keeps traces by the key of a call and by the state of the model."""

    def __init__(self) -> None:
        self._traces: dict[Any, list[tuple[PythonState, Traced]]] = {}
        self._fixed = False

    def find(self, key: tuple[Any, ...], suits: Callable[[Traced], bool] = lambda _: True) -> Traced | None:
        """Return the trace that is currently valid for such a call, among those that suit it."""
        entries = self._traces.get(key, ())
        valid = (traced for state, traced in entries if self._fixed or state.unchanged())
        return next((traced for traced in valid if suits(traced)), None)

    def fixed(self) -> TraceCache[Traced]:
        """Share traces with a copy of the model that a tool has hooked, without comparing states."""
        cache: TraceCache[Traced] = TraceCache()
        cache._traces, cache._fixed = self._traces, True
        return cache

    def keep(self, key: tuple[Any, ...], state: PythonState, traced: Traced) -> None:
        """Store a trace, with the model's state before it."""
        entries = self._traces.setdefault(key, [])
        entries.insert(0, (state, traced))
        del entries[_MAX_TRACES:]

    def __len__(self) -> int:
        return sum(map(len, self._traces.values()))
