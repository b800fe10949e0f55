"""Turns the arguments, names and metadata of a program's JSON into those of a graph."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload

from ampaudit.core.untrusted import describe
from ampaudit.source.pt2.tensors import SERIALIZED_DTYPES

__all__ = [
    "LISTS",
    "POSITIONAL",
    "SYMBOLS",
    "attribute_path",
    "call_arguments",
    "identifier",
    "layers_and_line",
    "list_item",
    "number",
    "only",
    "result_names",
    "setting",
]

_MEMORY_FORMATS = {
    1: torch.contiguous_format,
    2: torch.channels_last,
    3: torch.channels_last_3d,
    4: torch.preserve_format,
}
_STRIDED = 7
# attributes that weights must not replace
_MODULE_NAMES = frozenset(dir(nn.Module()))
_GRAPH_NAMES = frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))
POSITIONAL, _KEYWORD = 1, 2
SYMBOLS = ("as_sym_int", "as_sym_float", "as_sym_bool")
LISTS = {
    "as_tensors": "as_tensor",
    "as_sym_ints": "as_sym_int",
    "as_sym_floats": "as_sym_float",
    "as_sym_bools": "as_sym_bool",
    "as_optional_tensors": "",
}


def only(union: Any, what: str) -> tuple[str, Any]:
    """Return the one member of a union.

    Raises:
        ValueError: it has none or several.
    """
    if len(union) != 1:
        raise ValueError(f"an {what} has {len(union)} values instead of one")
    kind, value = next(iter(union.items()))
    return str(kind), value


def list_item(item: Any, kind: str) -> tuple[str, Any]:
    """Return the kind and the value of an item of a list, whose items are of one kind or unions."""
    return (kind, item) if kind else only(item, "argument")


def result_names(kind: str, value: Any) -> Any:
    """Return the name of a result, nested names for lists, and ``None`` for what nobody can use."""
    if kind == "as_tensor":
        return str(value["name"])
    if kind in SYMBOLS:
        return value.get("as_name")
    if kind in LISTS:
        return [result_names(*list_item(item, LISTS[kind])) for item in value]
    if kind in ("as_none", "as_int", "as_float", "as_bool", "as_ints", "as_floats", "as_bools"):
        return None
    raise ValueError(f"a call returns a value of the kind {kind}")


def call_arguments(
    target: OpOverload, given: Sequence[tuple[str, int | None, Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arrange arguments in the order of the operator's schema."""
    values = {name: (kind, value) for name, kind, value in given}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    positional = True
    for argument in target._schema.arguments:
        if argument.name not in values:
            if not argument.has_default_value():
                raise ValueError(f"a call of {target} lacks its argument {argument.name}")
            positional = False  # what follows has no place of its own
            continue
        kind, value = values.pop(argument.name)
        by_default = _KEYWORD if argument.has_default_value() or argument.kwarg_only else POSITIONAL
        by_name = (kind or by_default) == _KEYWORD and not keyword.iskeyword(argument.name)
        positional = positional and not argument.kwarg_only and not by_name
        if positional:
            args.append(value)
        else:
            kwargs[argument.name] = value
    if values:
        raise ValueError(f"a call of {target} has an argument {describe(next(iter(values)))!r}")
    return tuple(args), kwargs


def setting(kind: str, value: Any) -> Any:
    """Return a dtype, layout, device or memory format."""
    if kind == "as_scalar_type" and value in SERIALIZED_DTYPES:
        return SERIALIZED_DTYPES[value]
    if kind == "as_memory_format" and value in _MEMORY_FORMATS:
        return _MEMORY_FORMATS[value]
    if kind == "as_layout" and value == _STRIDED:
        return torch.strided
    if kind == "as_device":
        index = value.get("index")
        return torch.device(value["type"]) if index is None else torch.device(value["type"], index)
    raise ValueError(f"an argument of the kind {kind} cannot be read")


def number(value: Any) -> Any:
    """Return a number, or nested lists of them, in which JSON writes those that are not finite as text."""
    if isinstance(value, list):
        return [number(item) for item in value]
    return {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}.get(value, value)


def identifier(name: str) -> str:
    """Return a name that is safe in the Python code that torch makes of a graph."""
    plain = re.sub(r"\W", "_", name[:200], flags=re.ASCII)
    return f"_{plain}" if not plain.isidentifier() or keyword.iskeyword(plain) else plain


def attribute_path(path: str) -> str:
    """Return a dotted name of an attribute if each part is one that modules leave free.

    Raises:
        ValueError: it is not.
    """
    parts = path.split(".")
    if not all(map(_is_attribute, parts)) or parts[0] in _GRAPH_NAMES:
        raise ValueError(f"a weight has the name {describe(path)!r}")
    return path


def _is_attribute(part: str) -> bool:
    is_name = re.fullmatch(r"\w{1,500}", part, re.ASCII) is not None and not part.startswith("__")
    return is_name and part not in _MODULE_NAMES


def layers_and_line(given: Mapping[str, str]) -> dict[str, Any]:
    """Return the layers and the source line of a node, as far as they are told."""
    found: dict[str, Any] = {}
    if trace := given.get("stack_trace"):
        found["stack_trace"] = trace
    if stack := given.get("nn_module_stack"):
        layers = [_split(item) for item in stack.split(";")]
        found["nn_module_stack"] = {key: (path, kind) for key, path, kind in layers}
    return found


def _split(item: str) -> tuple[str, str, str]:
    """Split ``key,path,type``, of which the last two may hold commas in brackets."""
    parts = list(_at_commas(item))
    if len(parts) != 3:
        raise ValueError("a node's layers cannot be read")
    return parts[0], parts[1], parts[2]


def _at_commas(item: str) -> Iterator[str]:
    depth = start = 0
    for place, char in enumerate(item):
        depth += (char in "[(") - (char in ")]")
        if char == "," and depth == 0:
            yield item[start:place]
            start = place + 1
    yield item[start:]
