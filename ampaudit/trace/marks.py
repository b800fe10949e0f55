"""Marks in a graph that is being traced: where the author's code has a way back of its own, and what that is.

A mark is an op without a result, which every pass of ``torch.export`` carries along. ``number`` says which
application of a function, or which hook, it belongs to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

__all__ = [
    "APPLIED",
    "ENTERED",
    "GRADIENT",
    "HOOKED",
    "RETURNED",
    "TURNED",
    "is_mark",
    "kept_values",
    "marked",
    "number_of",
]

_LIBRARY = torch.library.Library("ampaudit", "DEF")
_SCHEMAS = (
    "entered(Tensor[] inputs, int number) -> ()",  # a function is given these
    "applied(Tensor[] outputs, int number) -> ()",  # and has made these
    "hooked(Tensor[] value, int number) -> ()",  # a hook waits for this value's gradient
    "turned(Tensor[] near, int number) -> ()",  # what follows is the way back
    "gradient(Tensor like, int number, int index) -> Tensor",  # stands for the gradient of an output
    "returned(Tensor?[] gradients, Tensor[] leaves, int number) -> ()",  # what the way back makes; its end
)


def _nothing(*args: Any) -> None:
    """A mark does nothing."""


for _schema in _SCHEMAS:
    _name = _LIBRARY.define(_schema)
    _LIBRARY.impl(
        _name.partition("::")[2] or _name,
        (lambda like, number, index: torch.empty_like(like)) if "gradient(" in _schema else _nothing,
        "CompositeExplicitAutograd",
    )

_OPS = torch.ops.ampaudit
ENTERED: OpOverload = _OPS.entered.default
APPLIED: OpOverload = _OPS.applied.default
HOOKED: OpOverload = _OPS.hooked.default
TURNED: OpOverload = _OPS.turned.default
GRADIENT: OpOverload = _OPS.gradient.default
RETURNED: OpOverload = _OPS.returned.default
_MARKS = frozenset({ENTERED, APPLIED, HOOKED, TURNED, GRADIENT, RETURNED})
for _mark in (ENTERED, APPLIED, HOOKED, TURNED, RETURNED):
    fx.node.has_side_effect(_mark)  # nothing that lacks users is dropped


def kept_values(values: list[Any], number: int) -> None:
    """The mark of a run's graph at which values are kept for a way back; some are numbers."""


def is_mark(target: Any) -> bool:
    """Whether a node's target is a mark, at which nothing is computed."""
    return target is kept_values or (isinstance(target, OpOverload) and target in _MARKS)


def marked(node: fx.Node) -> list[fx.Node]:
    """The values that a mark names."""
    return list(node.args[0])  # type: ignore[arg-type]


def number_of(node: fx.Node) -> int:
    """Which application or hook a mark is about."""
    number = node.args[1] if node.target is not RETURNED else node.args[2]
    assert isinstance(number, int)
    return number
