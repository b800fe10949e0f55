"""Turns the arguments of a call into JSON values and the bytes of its tensors, without pickle."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ampaudit.core.untrusted import describe

__all__ = ["EncodedCall", "Unstorable", "class_name", "encode_call"]

_MAX_DEPTH = 24  # of nested containers; a reader allows 100 levels of JSON, of which each takes up to four
_CACHES = "transformers.cache_utils"  # caches of Transformers are objects with plain attributes
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer, nn.UninitializedParameter)
_TORCH_VALUES = {torch.dtype: "dtype", torch.device: "device", torch.layout: "layout"}
_TORCH_VALUES |= {torch.memory_format: "memory_format"}


class Unstorable(Exception):
    """Raised for an argument that a recording cannot hold; the text names it."""


@dataclass(frozen=True, slots=True)
class EncodedCall:
    """The arguments of a call as JSON; ``tensors`` are those that the JSON describes, with its descriptions.

    The tensors are the caller's: they have to be written before the call goes on.
    """

    args: list[Any]
    kwargs: dict[str, Any]
    tensors: list[tuple[torch.Tensor, dict[str, Any]]]


def encode_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> EncodedCall:
    """Encode the arguments of a call.

    Raises:
        Unstorable: one of them is an object, a function, a file or the like.
    """
    encoder = _Encoder()
    positional = [encoder.encode(value, f"input[{index}]") for index, value in enumerate(args)]
    named = {name: encoder.encode(value, name) for name, value in kwargs.items()}
    return EncodedCall(positional, named, encoder.tensors)


def class_name(kind: type) -> str:
    """Return the name of a class with that of its module, such as ``torch.nn:Linear``."""
    return f"{kind.__module__}:{kind.__qualname__}"


@dataclass(slots=True)
class _Encoder:
    tensors: list[tuple[torch.Tensor, dict[str, Any]]] = field(default_factory=list)

    def encode(self, value: Any, place: str, depth: int = 0) -> Any:
        """Return JSON for a value; what JSON lacks is an object with the kind of value as its key."""
        if depth > _MAX_DEPTH:
            raise Unstorable(f"{describe(place)} is nested more than {_MAX_DEPTH} deep")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, place)
        if isinstance(value, np.ndarray | np.generic) and not isinstance(value, str | bytes):
            return self._array(value, place)
        if isinstance(value, enum.Enum) and value.name in type(value).__members__:
            return {"enum": [class_name(type(value)), value.name]}
        if isinstance(value, str | bytes | int | float | complex):
            return _scalar(value, place)
        for kind, name in _TORCH_VALUES.items():
            if isinstance(value, kind):
                return {name: str(value).removeprefix("torch.")}
        if isinstance(value, torch.Generator):
            return {"generator": value.initial_seed() % 2**63}
        if isinstance(value, type) and value.__module__ == _CACHES:
            return {"class": class_name(value)}
        return self._container(value, place, depth + 1)

    def _container(self, value: Any, place: str, depth: int) -> Any:
        def items(found: Any) -> list[Any]:
            return [self.encode(item, f"{place}[{index}]", depth) for index, item in enumerate(found)]

        def attributes(names: Iterator[tuple[str, Any]]) -> dict[str, Any]:
            return {name: self.encode(item, f"{place}.{name}", depth) for name, item in names}

        kind = type(value)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {"namedtuple": [class_name(kind), items(value)]}
        if isinstance(value, torch.Size):
            return {"size": items(value)}
        if isinstance(value, list):
            return items(value)
        if isinstance(value, tuple):  # torch's own structures as well
            return {"tuple": items(value)}
        if dataclasses.is_dataclass(value):
            fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
            return {"dataclass": [class_name(kind), attributes(fields)]}
        if isinstance(value, Mapping):
            pairs = [
                [self.encode(key, place, depth), self.encode(item, f"{place}[{key!r}]", depth)]
                for key, item in value.items()
            ]
            return {"dict": pairs}
        if isinstance(value, set | frozenset):
            return {"frozenset" if isinstance(value, frozenset) else "set": items(value)}
        if isinstance(value, slice | range):
            return {kind.__name__: items((value.start, value.stop, value.step))}
        if any(base.__module__ == _CACHES for base in kind.__mro__):
            return {"object": [class_name(kind), attributes(iter(vars(value).items()))]}
        what = "a function" if callable(value) and hasattr(value, "__code__") else f"of type {kind.__name__}"
        raise Unstorable(f"{describe(place)} is {describe(what)}")

    def _tensor(self, value: torch.Tensor, place: str) -> dict[str, Any]:
        what = ""
        if type(value) not in _PLAIN_TENSORS:
            what = f"a {type(value).__name__}"
        elif value.is_quantized or not _has_storage(value):
            what = "a tensor without a storage of its own"
        elif value.device.type == "meta":
            what = "a tensor without values"
        if what:
            raise Unstorable(f"{describe(place)} is {what}")
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        description: dict[str, Any] = {}  # filled when the tensor is written
        self.tensors.append((value.detach(), description))
        return description

    def _array(self, value: Any, place: str) -> dict[str, Any]:
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        try:
            return {kind: self._tensor(torch.from_numpy(np.array(value, order="C")), place)}
        except TypeError:
            raise Unstorable(f"{describe(place)} is a NumPy array of {value.dtype}") from None


def _has_storage(value: torch.Tensor) -> bool:
    """Return whether a tensor lies in memory: sparse and nested ones, and those inside vmap, do not."""
    try:
        value.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return value.layout is torch.strided


def _scalar(value: str | bytes | complex, place: str) -> Any:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Unstorable(f"{describe(place)} is a text with half of a surrogate pair") from None
        return str(value)
    if isinstance(value, int):
        if abs(value) >= 2**63:
            raise Unstorable(f"{describe(place)} is an integer of more than 64 bits")
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    return {"complex": str(complex(value))}
