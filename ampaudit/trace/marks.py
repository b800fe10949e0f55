"""Marks places in a graph while it is traced: custom backwards, and values that Python code reads.

A mark is an op without a result, which every pass of ``torch.export`` keeps. Its ``number`` identifies the
function call, the hook or the read that it belongs to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

__all__ = [
    "BACKWARD_END",
    "BACKWARD_START",
    "FUNCTION_INPUTS",
    "FUNCTION_OUTPUTS",
    "OUTPUT_GRADIENT",
    "TENSOR_HOOK",
    "VALUE_READ",
    "VALUE_SIZED",
    "is_mark",
    "mark_number",
    "marked_values",
    "saved_values",
]

_LIBRARY = torch.library.Library("ampaudit", "DEF")
_SCHEMAS = (
    "function_inputs(Tensor[] inputs, int number) -> ()",
    "function_outputs(Tensor[] outputs, int number) -> ()",
    "tensor_hook(Tensor[] value, int number) -> ()",  # hooks take this value's gradient
    "backward_start(Tensor[] near, int number) -> ()",  # the ops of the backward follow
    "output_gradient(Tensor like, int number, int index) -> Tensor",  # stands for the gradient of an output
    "backward_end(Tensor?[] gradients, Tensor[] leaves, int number) -> ()",  # what the backward returns
    "value_read(Tensor[] value, int number) -> ()",  # Python code reads this value
    "value_sized(Tensor[] value, int number) -> ()",  # values decide the size of this result
)


def _nothing(*args: Any) -> None:
    """Compute nothing, as befits a mark."""


for _schema in _SCHEMAS:
    _name = _LIBRARY.define(_schema)
    _LIBRARY.impl(
        _name.partition("::")[2] or _name,
        (lambda like, number, index: torch.empty_like(like)) if "output_gradient(" in _schema else _nothing,
        "CompositeExplicitAutograd",
    )

_OPS = torch.ops.ampaudit
FUNCTION_INPUTS: OpOverload = _OPS.function_inputs.default
FUNCTION_OUTPUTS: OpOverload = _OPS.function_outputs.default
TENSOR_HOOK: OpOverload = _OPS.tensor_hook.default
BACKWARD_START: OpOverload = _OPS.backward_start.default
OUTPUT_GRADIENT: OpOverload = _OPS.output_gradient.default
BACKWARD_END: OpOverload = _OPS.backward_end.default
VALUE_READ: OpOverload = _OPS.value_read.default
VALUE_SIZED: OpOverload = _OPS.value_sized.default
_BACKWARD = (FUNCTION_INPUTS, FUNCTION_OUTPUTS, TENSOR_HOOK, BACKWARD_START, BACKWARD_END)
_EFFECTS = (*_BACKWARD, VALUE_READ, VALUE_SIZED)
_MARKS = frozenset({*_EFFECTS, OUTPUT_GRADIENT})
for _mark in _EFFECTS:
    fx.node.has_side_effect(_mark)  # nothing that lacks users is dropped


def saved_values(values: list[Any], number: int) -> None:
    """Mark where a run saves values for a custom backward; some are numbers."""


def is_mark(target: Any) -> bool:
    """Return whether a node's target is a mark, which computes nothing."""
    return target is saved_values or (isinstance(target, OpOverload) and target in _MARKS)


def marked_values(node: fx.Node) -> list[fx.Node]:
    """Return the values that a mark refers to."""
    return list(node.args[0])  # type: ignore[arg-type]


def mark_number(node: fx.Node) -> int:
    """Return the number of the function call, hook or read that a mark belongs to."""
    number = node.args[1] if node.target is not BACKWARD_END else node.args[2]
    assert isinstance(number, int)
    return number
