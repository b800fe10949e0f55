"""Joins the values of two paths, and those of several items."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ampaudit.linter.diagnostic import Certainty
from ampaudit.linter.flow.torch_names import DTYPES
from ampaudit.linter.flow.values import (
    MAYBE,
    UNKNOWN,
    Autocast,
    DictLiteral,
    DtypeChoice,
    ImportedName,
    KnownItems,
    LiteralValue,
    LossGradients,
    Managed,
    Model,
    Optimizer,
    Parameters,
    Scaler,
    Tensor,
    Unknown,
    Value,
)

__all__ = ["choice_of_dtypes", "flattened", "item_of", "join_items", "join_values"]


def join_values(one: Value, other: Value) -> Value:
    """Return the value of a name that two branches assign."""
    if one == other:
        return one
    for value, absent in ((other, one), (one, other)):
        if isinstance(absent, LiteralValue) and absent.value is None:
            # it is used only where it is not None
            return replace(value, optional=True) if isinstance(value, Scaler) else value
    if isinstance(one, Optimizer) and isinstance(other, Optimizer):
        models = None if one.models is None or other.models is None else one.models | other.models
        (class_name,) = _agreement(one, other, "class_name", otherwise="")
        return replace(one, class_name=class_name, models=models)
    for managed, plain in ((one, other), (other, one)):
        if isinstance(managed, Managed) and isinstance(plain, Optimizer | Unknown):  # prepared in one branch
            return replace(managed, scales=Certainty.UNKNOWN, divides=False)
    if isinstance(one, Scaler) and isinstance(other, Scaler):
        enabled = one.enabled if one.enabled == other.enabled else None
        return replace(one, enabled=enabled, optional=one.optional or other.optional)
    if isinstance(one, Model) and isinstance(other, Model) and one.key == other.key:
        return replace(one, wrapper=one.wrapper if one.wrapper == other.wrapper else "")
    if isinstance(one, Autocast) or isinstance(other, Autocast):
        return _join_contexts(one, other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _join_tensors(one, other)
    if isinstance(one, KnownItems) and isinstance(other, KnownItems) and len(one.items) == len(other.items):
        items = tuple(map(_one_of, one.items, other.items))
        return KnownItems(items, one.repeated or other.repeated)
    if isinstance(one, Parameters) and isinstance(other, Parameters):
        models = None if one.models is None or other.models is None else one.models | other.models
        return replace(one, models=models) if one.cast is other.cast else Parameters(models)
    if isinstance(one, DictLiteral) and isinstance(other, DictLiteral) and one.node is other.node:
        return _join_dicts(one, other)
    return choice_of_dtypes(one, other)


def choice_of_dtypes(*values: Value) -> Value:
    """Return which dtypes some values name, if all of them name one."""
    names: set[str] = set()
    for value in values:
        dtype = DTYPES.get(value.path) if isinstance(value, ImportedName) else None
        choices = value.names if isinstance(value, DtypeChoice) else {dtype} if dtype else None
        if not choices:
            return UNKNOWN
        names |= choices
    return DtypeChoice(frozenset(names)) if len(names) > 1 else values[0] if values else UNKNOWN


def _join_dicts(one: DictLiteral, other: DictLiteral) -> DictLiteral:
    """Return a dict with the items that either path has set."""
    for name, value in zip(other.names, other.items, strict=True):
        existing = one.item(name)
        one = one.with_item(name, value if existing is None else join_values(existing, value))
    return one


def item_of(value: Value) -> Value:
    """Return the value of any item of an iterable."""
    if isinstance(value, KnownItems):
        result: Value = value.items[0] if value.items else UNKNOWN
        for item in value.items[1:]:
            result = _one_of(result, item)
        several = len(value.items) > 1 or value.repeated
        return replace(result, one_of_several=True) if isinstance(result, Optimizer) and several else result
    return value if isinstance(value, Tensor | LossGradients | Parameters | Managed) else UNKNOWN


def _one_of(one: Value, other: Value) -> Value:
    """Return the value of either of two items; of two scalers it is not known what they have scaled."""
    joined = join_values(one, other)
    if isinstance(one, Scaler) and isinstance(other, Scaler) and one.key != other.key:
        return replace(one, key="one of several", node=None)
    return joined


def join_items(items: KnownItems, added: Value) -> KnownItems:
    """Return a list after another item was added, of which any may be meant later."""
    return KnownItems((_one_of(item_of(items), added) if items.items else added,), repeated=True)


def flattened(values: Iterable[Value]) -> list[Value]:
    """Return some values with the items of tuples and lists in place of these."""
    items: list[Value] = []
    for value in values:
        items += flattened(value.items) if isinstance(value, KnownItems) else [value]
    return items


def _join_contexts(one: Value, other: Value) -> Value:
    if isinstance(one, Autocast) and isinstance(other, Autocast):
        enabled, device, dtype = _agreement(one, other, "enabled", "device", "dtype")
        return Autocast(enabled, device, dtype, one.node)
    context = one if isinstance(one, Autocast) else other
    assert isinstance(context, Autocast)
    return replace(context, enabled=None)


def _join_tensors(one: Tensor, other: Tensor) -> Tensor:
    dtype, weights_dtype, computed_under, loss = _agreement(
        one, other, "dtype", "weights_dtype", "computed_under", "loss", otherwise=""
    )
    upcast, model_calls, divided, sigmoid, node = _agreement(
        one, other, "upcast", "model_calls", "divided", "sigmoid", "node"
    )
    (scaler_key,) = _agreement(one, other, "scaler_key", otherwise=MAYBE)
    rounded = one.rounded or other.rounded
    detached = one.is_detached and other.is_detached
    return Tensor(
        scaler_key,
        dtype,
        weights_dtype,
        computed_under,
        upcast,
        model_calls,
        loss,
        divided,
        sigmoid,
        rounded,
        detached,
        node,
    )


def _agreement(one: Value, other: Value, *fields: str, otherwise: str | None = None) -> list[Any]:
    """Return fields of two values, with a default where they differ."""
    pairs = [(getattr(one, field), getattr(other, field)) for field in fields]
    return [left if left == right else otherwise for left, right in pairs]
