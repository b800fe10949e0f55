"""Interprets calls of built-in functions."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ampaudit.linter.flow.events import NumberRead
from ampaudit.linter.flow.joining import item_of
from ampaudit.linter.flow.values import (
    UNKNOWN,
    UNSCALED_TENSOR,
    DeviceValue,
    DictLiteral,
    KnownItems,
    LiteralValue,
    Parameters,
    Tensor,
    Value,
)

if TYPE_CHECKING:
    from ampaudit.linter.flow.arguments import Arguments
    from ampaudit.linter.flow.interpreter import Interpreter


__all__ = ["call_builtin"]


def call_builtin(interpreter: Interpreter, node: ast.Call, name: str, arguments: Arguments) -> Value:
    """Interpret ``str``, ``zip`` and the like."""
    first = arguments.positional[0] if arguments.positional else UNKNOWN
    if name == "float" and isinstance(first, Tensor) and first.node is not None:
        interpreter.record(NumberRead(interpreter.at(node), first))
        return UNSCALED_TENSOR
    if name == "str" and isinstance(first, DeviceValue) and first.has_index:
        return LiteralValue(f"{first.type}:0")
    if name == "dict" and not arguments.positional:
        return DictLiteral(tuple(arguments.keywords.values()), node, tuple(arguments.keywords))
    if name == "sum" and isinstance(first, KnownItems | Tensor):
        return item_of(first)
    if name in ("enumerate", "zip"):
        return KnownItems(
            (
                KnownItems(
                    (
                        UNKNOWN if name == "enumerate" else item_of(first),
                        *map(item_of, ([first] if name == "enumerate" else arguments.positional[1:])),
                    )
                ),
            ),
            repeated=True,
        )
    if name == "next" and isinstance(first, Parameters):
        return first
    return (
        UNSCALED_TENSOR
        if name in ("len", "range", "int", "str", "min", "max", "round", "abs", "print")
        else UNKNOWN
    )
