"""Runs code without changing the user's model or the global random state.

``copy.deepcopy`` fails at the first lock, open file or non-leaf tensor. Here such an object is shared and
everything around it is copied, so that code which runs on the copy leaves the user's model unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import gc
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import delitem, setitem
from typing import Any, TypeVar

import numpy as np
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ampaudit.trace.internals import FakeTensor, Replacement, patched

Copied = TypeVar("Copied")

# immutable types, and graphs, which no run changes
_ATOMS = (
    *(types.NoneType, bool, int, float, complex, str, bytes, type),
    *(types.ModuleType, types.CodeType, torch.dtype, torch.device, fx.Graph, pytree.TreeSpec),
)
_LOCK = threading.RLock()
_TABLES = (dict, list, OrderedDict, defaultdict)
_LARGEST_CACHE = 1_000  # entries; a larger dict or list is data
_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")


@contextmanager
def isolated() -> Iterator[None]:
    """Audit outside the caller's autocast region, without changing the state of its generators.

    One thread audits at a time, since generators, and torch's attributes that a trace replaces, belong to the
    process.
    """
    with _LOCK:
        regions = [device for device in _AUTOCAST_DEVICES if torch.is_autocast_enabled(device)]
        try:
            for device in regions:
                torch.set_autocast_enabled(device, False)
            with preserved():
                yield
        finally:
            for device in regions:
                torch.set_autocast_enabled(device, True)


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the state of each generator afterwards.

    Unlike ``isolated``, any thread may enter it meanwhile, such as autograd's for a GPU.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed each generator while active, and restore its state afterwards."""
    with preserved():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        yield


@contextmanager
def autocast_to_float32() -> Iterator[None]:
    """Let the autocast regions of a model's code cast to float32 while active, for a call in FP32."""
    enter = torch.autocast.__enter__

    def widened(region: Any) -> Any:
        entered = enter(region)
        torch.set_autocast_dtype(region.device, torch.float32)
        return entered

    with patched((Replacement(torch.autocast, "__enter__", widened),)):
        yield


@contextmanager
def caches_cleared_of_fakes(model: nn.Module) -> Iterator[None]:
    """Remove the fake tensors of a trace afterwards from what the model shares with other code.

    Code may keep tensors in global variables, in attributes of classes, in dicts and lists there, and under
    ``functools.lru_cache``, where the next call would find them. The model's classes and the modules of their
    packages are searched.
    """
    classes = {base for module in model.modules() for base in type(module).__mro__}
    packages = {base.__module__.partition(".")[0] for base in classes} - {"torch", "builtins"}
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in packages]
    owners = [*classes, *(module for module in modules if isinstance(module, types.ModuleType))]
    variables = [(owner, _entries(owner)) for owner in owners]
    tables = _tables_in(variables)
    before = [*variables, *tables, *_tables_in(tables)]
    values = [value for _, entries in variables for value in entries.values()]
    functions = [v.__func__ if type(v) in (staticmethod, classmethod) else v for v in values]
    caches = {f: f.cache_info() for f in functions if type(f) is functools._lru_cache_wrapper}
    try:
        yield
    finally:
        for owner, old in before:
            _restore(owner, old)
        for cache, info in caches.items():
            if cache.cache_info() != info and _has_fakes(gc.get_referents(cache)):
                cache.cache_clear()


def _tables_in(owners: Iterable[tuple[Any, dict[Any, Any]]]) -> list[tuple[Any, dict[Any, Any]]]:
    """Return the dicts and lists among some entries, with copies of their own; large ones are data."""
    values = {id(value): value for _, entries in owners for value in entries.values()}
    return [(v, _entries(v)) for v in values.values() if type(v) in _TABLES and len(v) <= _LARGEST_CACHE]


def _entries(owner: Any) -> dict[Any, Any]:
    """Copy the variables of a class or a module, or the entries of a dict or a list."""
    if isinstance(owner, list):
        return dict(enumerate(owner))
    return dict(owner if isinstance(owner, dict) else vars(owner))


def _restore(owner: Any, old: Mapping[Any, Any]) -> None:
    """Put the old entries where fake tensors have come in."""
    changed = ((key, value) for key, value in _entries(owner).items() if value is not old.get(key))
    fakes = [key for key, value in changed if _has_fakes(value)]
    if fakes and isinstance(owner, list):
        owner[:] = old.values()
        return
    remove, store = (delitem, setitem) if isinstance(owner, dict) else (delattr, setattr)
    for key in fakes:
        if key in old:
            store(owner, key, old[key])
        else:
            remove(owner, key)


def _has_fakes(value: Any, depth: int = 4) -> bool:
    if depth == 0 or not isinstance(value, dict | list | tuple):
        return isinstance(value, FakeTensor)
    items = list(value.values()) if isinstance(value, dict) else value
    return any(_has_fakes(item, depth - 1) for item in items)


def host_state() -> tuple[Any, ...]:
    """Return the state of Python's and NumPy's generators, to detect whether a number was drawn."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), tuple(rest)


@torch.no_grad()
def call_unchanged(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, seed: int) -> Any:
    """Call a model without gradients, on a copy that shares its parameters, and on copies of its inputs.

    Autocast regions in its code cast to float32, and what it prints goes to stderr.

    Inputs, buffers and Python attributes keep their values, whatever the model writes to them. The model may
    be any callable.
    """
    if isinstance(model, nn.Module):
        shared = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
        model = structural_copy(model, shared)
    copies: dict[int, torch.Tensor] = {}  # a tensor that is given twice is one
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda given: copies.setdefault(id(given), given.detach().clone()), (args, dict(kwargs))
    )
    with seeded(seed), autocast_to_float32(), contextlib.redirect_stdout(sys.stderr):
        return model(*args, **kwargs)


def structural_copy(value: Copied, replace: Mapping[int, Any] | None = None) -> Copied:
    """Copy modules, containers, objects, hooks and closures, preserving ties.

    A hook or a patched ``forward`` that closes over the model, a list or a counter closes over their copies.
    Objects that cannot be copied (locks, files, handles), or that release something when they are collected,
    are shared. ``replace`` has replacements by the ``id`` of a tensor or a module; other tensors are cloned.
    A mapping of each parameter to itself makes a copy that shares parameters and has buffers of its own.
    """
    clone: Copied = _Copier(replace or {}).copied(value)
    return clone


class _Copier:
    """One copy in progress; ``_memo`` maps the id of each original to its copy, as ``copy.deepcopy`` does."""

    def __init__(self, replace: Mapping[int, Any]) -> None:
        self._memo: dict[int, Any] = dict(replace)
        self._originals: list[Any] = []  # an id means one object for as long as that lives

    def copied(self, value: Any) -> Any:
        """Copy a value once."""
        if isinstance(value, _ATOMS) or type(value) is object:
            return value
        if id(value) not in self._memo:
            self._originals.append(value)
            self._memo[id(value)] = self._copy(value)
        return self._memo[id(value)]

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            return self._filled(object.__new__(type(value)), value)
        special = _SPECIAL.get(type(value))
        return self._object(value) if special is None else special(self, value)

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        if value.is_leaf:
            with contextlib.suppress(Exception):
                tensor: torch.Tensor = copy.deepcopy(value, self._memo)  # views of one storage stay so
                return tensor
        return value.detach().clone()

    def _filled(self, target: Any, value: Any) -> Any:
        """Fill an empty object with copies of another one's attributes."""
        self._memo[id(value)] = target
        for name, item in getattr(value, "__dict__", {}).items():
            target.__dict__[name] = self.copied(item)
        for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
            with contextlib.suppress(AttributeError):
                object.__setattr__(target, name, self.copied(getattr(value, name)))
        return target

    def _object(self, value: Any) -> Any:
        """Copy by the object's own protocol, else attribute by attribute, else share it."""
        if hasattr(type(value), "__del__"):
            return value
        size_before = len(self._memo)
        for attempt in (self._by_protocol, self._by_attributes):
            try:
                return attempt(value)
            except Exception:
                while len(self._memo) > size_before:  # a half-made copy, and what refers to it
                    self._memo.popitem()
        return value

    def _by_protocol(self, value: Any) -> Any:
        """Copy as ``copy.deepcopy`` does, but share parts that cannot be copied."""
        deepcopy = getattr(value, "__deepcopy__", None)
        if deepcopy is not None:
            return deepcopy(self._memo)
        reduce = copyreg.dispatch_table.get(type(value))
        reduced = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return value
        make, args, state, items, pairs = (*reduced, None, None, None)[:5]
        instance = make(*map(self.copied, args))
        self._memo[id(value)] = instance
        if state is not None:
            state = self.copied(state)
            if hasattr(instance, "__setstate__"):
                instance.__setstate__(state)
            else:
                pair = isinstance(state, tuple) and len(state) == 2
                attributes, slots = state if pair else (state, None)
                instance.__dict__.update(attributes or {})
                for name, item in (slots or {}).items():
                    setattr(instance, name, item)
        for item in items or ():
            instance.append(self.copied(item))
        for key, item in pairs or ():
            instance[self.copied(key)] = self.copied(item)
        return instance

    def _by_attributes(self, value: Any) -> Any:
        """Copy a plain Python object that cannot be pickled; ``__new__`` fails for others."""
        return self._filled(object.__new__(type(value)), value)

    def list(self, value: list[Any]) -> Any:
        items: list[Any] = []
        self._memo[id(value)] = items
        items.extend(map(self.copied, value))
        return items

    def dict(self, value: dict[Any, Any]) -> Any:
        items: dict[Any, Any] = {}
        self._memo[id(value)] = items
        items.update((self.copied(key), self.copied(item)) for key, item in value.items())
        return items

    def set(self, value: set[Any]) -> Any:
        return set(map(self.copied, value))

    def tuple(self, value: tuple[Any, ...]) -> Any:
        items = tuple(map(self.copied, value))
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items

    def method(self, value: types.MethodType) -> Any:
        return types.MethodType(value.__func__, self.copied(value.__self__))

    def builtin(self, value: types.BuiltinMethodType) -> Any:
        """Bind ``results.append`` to the copied list; ``torch.relu`` stays itself."""
        owner = self.copied(value.__self__)
        return value if owner is value.__self__ else getattr(owner, value.__name__)

    def function(self, value: types.FunctionType) -> Any:
        """Copy the variables of a closure; a function without any is shared."""
        if not value.__closure__:
            return value
        cells = tuple(map(self.copied, value.__closure__))
        function = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        self._memo[id(value)] = function
        for name in ("__defaults__", "__kwdefaults__", "__dict__"):
            setattr(function, name, self.copied(getattr(value, name)))
        function.__qualname__, function.__module__ = value.__qualname__, value.__module__
        return function

    def cell(self, value: types.CellType) -> Any:
        self._memo[id(value)] = cell = types.CellType()
        with contextlib.suppress(ValueError):  # an empty one
            cell.cell_contents = self.copied(value.cell_contents)
        return cell

    def weak(self, value: weakref.ref[Any]) -> Any:
        target = value()
        return weakref.ref(self.copied(target)) if isinstance(target, nn.Module | torch.Tensor) else value


_SPECIAL: Mapping[type, Callable[[_Copier, Any], Any]] = {
    list: _Copier.list,
    dict: _Copier.dict,
    set: _Copier.set,
    tuple: _Copier.tuple,
    types.MethodType: _Copier.method,
    types.BuiltinMethodType: _Copier.builtin,
    types.FunctionType: _Copier.function,
    types.CellType: _Copier.cell,
    weakref.ref: _Copier.weak,
}
