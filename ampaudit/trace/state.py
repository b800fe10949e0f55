"""Takes snapshots of a model's Python state to detect changes.

A snapshot holds the containers themselves and a shallow copy of each: comparing the two lists is one
comparison in C, which takes a fraction of a millisecond for a model of hundreds of modules.
"""

from __future__ import annotations

import collections
import copy
import enum
import io
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.trace.internals import global_hooks

Traced = TypeVar("Traced")

_MAX_TRACES = 8  # traces per key: those of the states seen last

_VALUES = (types.NoneType, bool, int, complex, str, bytes, type, enum.Enum, torch.dtype, torch.device)
_TABLES = ("_parameters", "_buffers")  # of tensors: their values are inputs of a graph
# hooks that no forward pass calls; FSDP's hold its own state, which changes with each pass
_IDLE = frozenset(
    """
    _state_dict_hooks _state_dict_pre_hooks _load_state_dict_pre_hooks _load_state_dict_post_hooks
    """.split()
)
_CONTAINERS = (list, dict, set, collections.deque)
_PLAIN = (types.NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_SKIPPED = (type, types.ModuleType, types.BuiltinFunctionType, *_PLAIN)


@dataclass(frozen=True, slots=True)
class StateChange:
    """A change to one container by the model's code."""

    number: int  # index of the container in a snapshot
    name: str  # path of the change, such as ``encoder.step``
    before: Any  # a shallow copy of the container before the run
    after: Any  # the same after it
    plain: bool  # whether all new values are numbers, strings and containers of these
    # the previous tensors, if all new values are tensors of the same shapes
    stale: tuple[torch.Tensor, ...] | None = None


class PythonState:
    """A snapshot of a model's modes, attributes, containers, hooks, closures and dtypes.

    Snapshots of a model and of its copy list the same containers in the same order.
    """

    def __init__(self, model: nn.Module) -> None:
        self.live: list[Any] = []  # the containers
        self.names: list[str] = []  # the path of each, of a module and an attribute
        self._then: list[Any] = []
        self._tables: list[dict[str, Any]] = []
        self._tables_then: list[dict[str, Any]] = []
        self._constants: list[torch.Tensor] = []
        self._arrays: list[tuple[Any, bytes]] = []
        self._always_changed = False
        self._visited: set[int] = set()
        for table in global_hooks:
            self._add(table, dict(table), "torch.nn")
        for path, module in model.named_modules():
            self._module(module, path)
        self._table_tensors = [t for table in self._tables for t in table.values() if t is not None]
        self._dtypes = [t.dtype for t in self._table_tensors]
        self._versions = [t._version for t in self._constants]
        del self._visited

    def unchanged(self) -> bool:
        """Return whether the model is still in the state of the snapshot."""
        if self._always_changed or [t.dtype for t in self._table_tensors] != self._dtypes:
            return False
        if [t._version for t in self._constants] != self._versions:
            return False
        if any(array.tobytes() != before for array, before in self._arrays):
            return False
        if not _equal(self.live, self._then):
            return False
        return _equal(self._tables, self._tables_then) or all(map(_alike, self._tables, self._tables_then))

    def changes(self) -> Iterator[StateChange]:
        """Return the changes since the snapshot."""
        for number, (now, then) in enumerate(zip(self.live, self._then, strict=True)):
            if not _equal(now, then):
                keys, plain = _new_items(then, now)
                name = ", ".join(f"{self.names[number]}{key}".lstrip(".") for key in keys)
                stale = None if plain else _stale(then, now)
                yield StateChange(number, name or self.names[number], then, _shallow(now), plain, stale)

    def _module(self, module: nn.Module, path: str) -> None:
        if id(module) in self._visited:
            return
        self._visited.add(id(module))
        attributes = vars(module)
        self._add(attributes, dict(attributes), path)
        for name, value in attributes.items():
            if name in _TABLES:
                self._tables.append(value)
                self._tables_then.append(dict(value))
            elif name == "_modules":  # each has its own turn
                self._add(value, dict(value), path)
            elif name not in _IDLE:
                self._visit(value, f"{path}.{name}" if path else name)

    def _add(self, now: Any, then: Any, name: str) -> None:
        self.live.append(now)
        self._then.append(then)
        self.names.append(name)

    def _visit(self, value: Any, name: str) -> None:
        if isinstance(value, _SKIPPED) or id(value) in self._visited:
            return
        if isinstance(value, nn.Module):
            self._module(value, name)
            return
        self._visited.add(id(value))
        if isinstance(value, torch.Tensor):
            if not isinstance(value, nn.Parameter):
                self._constants.append(value)
        elif isinstance(value, np.ndarray):
            self._arrays.append((value, value.tobytes()))
        elif isinstance(value, (*_CONTAINERS, tuple)):
            if not isinstance(value, tuple):
                self._add(value, _shallow(value), name)
            # through iter, since list asks for a length, which a subclass may refuse
            for item in list(iter(value.values() if isinstance(value, dict) else value)):
                self._visit(item, name)
        elif isinstance(value, collections.abc.Iterator) and not isinstance(value, io.IOBase):
            self._always_changed = True  # its position cannot be read
        else:
            self._object(value, name)

    def _object(self, value: Any, name: str) -> None:
        if isinstance(value, types.MethodType):
            self._visit(value.__self__, name)
        for cell in getattr(value, "__closure__", None) or ():
            if id(cell) not in self._visited and cell != types.CellType():
                self._visited.add(id(cell))
                self._add(cell, types.CellType(cell.cell_contents), name)
                self._visit(cell.cell_contents, name)
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and attributes:
            self._visit(attributes, name)


def apply_changes(changes: Sequence[StateChange], state: PythonState) -> None:
    """Apply the plain changes of a copy to the containers of its model."""
    for change in changes:
        if change.plain:
            _repeat(change.before, change.after, state.live[change.number])


def _repeat(then: Any, now: Any, container: Any) -> None:
    now = copy.deepcopy(now) if _is_plain(now) else now
    if isinstance(now, types.CellType):
        container.cell_contents = copy.deepcopy(now.cell_contents)
    elif isinstance(now, dict):
        for key in then.keys() - now.keys():
            container.pop(key, None)
        container.update({key: copy.deepcopy(value) for key, value in _new_values(then, now).items()})
    elif isinstance(now, list):
        unchanged = [old is new for old, new in zip(then, now, strict=False)]
        container[:] = [
            container[i] if i < len(unchanged) and unchanged[i] else item for i, item in enumerate(now)
        ]
    else:
        container.clear()
        (container.update if isinstance(now, set) else container.extend)(now)


def _new_items(then: Any, now: Any) -> tuple[list[str], bool]:
    """Return keys with new values, and whether all new items of a container are plain."""
    if isinstance(now, types.CellType):
        return [], _is_plain(now.cell_contents)
    if isinstance(now, dict):
        new = _new_values(then, now)
        return [f".{key}" for key in new], _is_plain(new)
    if isinstance(now, list):
        return [], all((i < len(then) and then[i] is item) or _is_plain(item) for i, item in enumerate(now))
    return [], _is_plain(now)


def _stale(then: Any, now: Any) -> tuple[torch.Tensor, ...] | None:
    if isinstance(now, dict):
        new = _new_values(then, now)
        then, now = [then.get(key) for key in new], list(new.values())
    before, after = _leaves(then), _leaves(now)
    alike = [_shape(leaf) for leaf in before] == [_shape(leaf) for leaf in after]
    return tuple(before) if alike and None not in map(_shape, after) else None


def _leaves(value: Any) -> list[Any]:
    """Return the values in nested containers, also those that weak references refer to."""
    leaves = pytree.tree_leaves(value)
    return [leaf() if isinstance(leaf, weakref.ref) else leaf for leaf in leaves]


def _shape(leaf: Any) -> torch.Size | None:
    return leaf.shape if isinstance(leaf, torch.Tensor) else None


def _new_values(then: dict[Any, Any], now: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: value
        for key, value in now.items()
        if key not in then or (then[key] is not value and not _equal(then[key], value))
    }


def _is_plain(value: Any) -> bool:
    """Return whether a value can be copied between models: no tensor, module or other object."""
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _shallow(value: Any) -> Any:
    if isinstance(value, types.CellType):
        return types.CellType(value.cell_contents)
    kind = next(kind for kind in _CONTAINERS if isinstance(value, kind))
    return kind(value)


def _equal(now: Any, then: Any) -> bool:
    try:
        return bool(now == then)
    except Exception:  # two tensors, say, which are not the same one
        return False


def _alike(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """Return whether a table has tensors of the same kinds; their identity is looked up for each run."""
    kinds = ([(k, t is None or (t.shape, t.dtype)) for k, t in table.items()] for table in (now, then))
    return _equal(*kinds)


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
    # a plain object is compared by its class and attributes, others by their own equality
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
