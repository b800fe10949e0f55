"""Joins the values of two paths, and those of several items."""

from __future__ import annotations

from dataclasses import replace

from ampaudit.lint.flow.values import (
    MAYBE,
    UNKNOWN,
    Autocast,
    Constant,
    KnownItems,
    LossGradients,
    Managed,
    Model,
    Optimizer,
    Parameters,
    Scaler,
    Tensor,
    Value,
)

__all__ = ["item_of", "join_values"]


def join_values(one: Value, other: Value) -> Value:
    """Return the value of a name that two branches assign."""
    if one == other:
        return one
    if isinstance(one, Constant) and one.value is None:
        return other  # it is used only where it is not None
    if isinstance(other, Constant) and other.value is None:
        return one
    if isinstance(one, Optimizer) and isinstance(other, Optimizer):
        models = None if one.models is None or other.models is None else one.models | other.models
        return replace(
            one, class_name=one.class_name if one.class_name == other.class_name else "", models=models
        )
    if isinstance(one, Scaler) and isinstance(other, Scaler):
        same = one.enabled if one.enabled == other.enabled else None
        return replace(one, enabled=same)
    if isinstance(one, Model) and isinstance(other, Model) and one.key == other.key:
        return replace(one, wrapper=one.wrapper if one.wrapper == other.wrapper else "")
    if isinstance(one, Autocast) or isinstance(other, Autocast):
        return _join_contexts(one, other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _join_tensors(one, other)
    return UNKNOWN


def item_of(value: Value) -> Value:
    """Return the value of any item of an iterable."""
    if isinstance(value, KnownItems):
        result: Value = value.items[0] if value.items else UNKNOWN
        for item in value.items[1:]:
            result = join_values(result, item)
        several = len(value.items) > 1 or value.repeated
        return replace(result, one_of_several=True) if isinstance(result, Optimizer) and several else result
    return value if isinstance(value, Tensor | LossGradients | Parameters | Managed) else UNKNOWN


def _join_contexts(one: Value, other: Value) -> Value:
    if isinstance(one, Autocast) and isinstance(other, Autocast):
        return Autocast(
            enabled=one.enabled if one.enabled == other.enabled else None,
            device=one.device if one.device == other.device else None,
            dtype=one.dtype if one.dtype == other.dtype else None,
            node=one.node,
        )
    known = one if isinstance(one, Autocast) else other
    assert isinstance(known, Autocast)
    return replace(known, enabled=None)


def _join_tensors(one: Tensor, other: Tensor) -> Tensor:
    return Tensor(
        scaler_key=one.scaler_key if one.scaler_key == other.scaler_key else MAYBE,
        cast=one.cast if one.cast == other.cast else "",
        computed_under=one.computed_under if one.computed_under == other.computed_under else "",
        upcast=one.upcast if one.upcast is other.upcast else None,
        model_calls=one.model_calls if one.model_calls == other.model_calls else None,
        loss=one.loss if one.loss == other.loss else "",
        divided=one.divided if one.divided == other.divided else None,
        sigmoid=one.sigmoid if one.sigmoid is other.sigmoid else None,
        node=one.node if one.node is other.node else None,
    )
