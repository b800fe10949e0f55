"""Reads how a program's inputs and outputs are nested, without importing classes."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from torch.utils import _pytree as pytree
from typing_extensions import TypedDict

from ampaudit.core.untrusted import describe, parse_json

__all__ = ["flatten", "read_structure"]

_SEQUENCES: Mapping[str, type] = {
    "builtins.tuple": tuple,
    "builtins.list": list,
    "collections.deque": deque,
    "collections.namedtuple": tuple,
}
_MAPPINGS: Mapping[str, type] = {
    "builtins.dict": dict,
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": dict,
}
_VERSION = 1


class _Spec(TypedDict):
    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]
    type: Annotated[str, Field(max_length=1_000)] | None
    context: Any
    children_spec: list[_Spec]


_SPEC = TypeAdapter(_Spec)
_KEYS = TypeAdapter(list[str | int], config=ConfigDict(strict=True))


def read_structure(text: str, *, output: bool) -> pytree.TreeSpec:
    """Parse the output of ``torch.utils._pytree.treespec_dumps``.

    Args:
        text: Version and nested containers, in JSON.
        output: Whether it describes outputs, in which an object is read as a dict of its
            fields or as a tuple; inputs must consist of Python's own containers.

    Raises:
        ValueError: The text is malformed, or holds a container that only code could build.
    """
    document = parse_json(text)
    if not isinstance(document, list) or len(document) != 2 or document[0] != _VERSION:
        raise ValueError(f"the nesting of its {'outputs' if output else 'inputs'} is not readable")
    try:
        return _spec(_SPEC.validate_python(document[1]), output)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"the nesting of its values: {describe(fault['msg'])}") from error


def flatten(value: Any, structure: pytree.TreeSpec) -> list[Any]:
    """Return the leaves of a value in the order of a structure; sequence types are interchangeable.

    Raises:
        ValueError: The value is nested in another way.
    """
    if structure.is_leaf():
        return [value]
    children = structure.children()
    if structure.type in _SEQUENCES.values():
        fits = isinstance(value, tuple | list | deque) and len(value) == len(children)
        items = list(value) if fits else []
    else:
        fits = isinstance(value, Mapping) and set(value) == set(structure.context)
        items = [value[key] for key in structure.context] if fits else []
    if not fits:
        what = "keys" if structure.type in _MAPPINGS.values() else "values"
        raise ValueError(f"a {structure.type.__name__} with {len(children)} {what} is expected")
    return [leaf for item, child in zip(items, children, strict=True) for leaf in flatten(item, child)]


def _spec(spec: _Spec, output: bool) -> pytree.TreeSpec:
    kind, children = spec["type"], [_spec(child, output) for child in spec["children_spec"]]
    if kind is None:
        if children:
            raise ValueError("a value without a type has parts")
        return pytree.treespec_leaf()
    if kind in _SEQUENCES:
        return pytree.TreeSpec(_SEQUENCES[kind], None, children)
    keys = _keys(spec["context"])
    if kind in _MAPPINGS or output:
        if keys is not None and len(keys) == len(children):
            return pytree.TreeSpec(_MAPPINGS.get(kind, dict), keys, children)
        if kind not in _MAPPINGS:
            return pytree.TreeSpec(tuple, None, children)
        raise ValueError("a dict has not as many keys as values")
    raise ValueError(f"it takes an object of the class {describe(kind)!r}")


def _keys(context: Any) -> list[str | int] | None:
    """Return the keys of a dict or the field names of an object, if the context has them."""
    if isinstance(context, str):
        try:
            context = parse_json(context)
        except ValueError:
            return None
    if isinstance(context, dict):  # a defaultdict
        context = context.get("dict_context")
    try:
        keys = _KEYS.validate_python(context)
    except ValidationError:
        return None
    return keys if len(set(keys)) == len(keys) else None
