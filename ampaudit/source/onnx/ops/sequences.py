"""Operators on sequences and optional values."""

from __future__ import annotations

from typing import Any

import torch

from ampaudit.source.onnx.ops.registry import operator
from ampaudit.source.onnx.values import NodeCall, Operand

__all__: list[str] = []


def _list(call: NodeCall, value: Operand) -> list[Any]:
    if not isinstance(value, list):
        raise call.fault("an input is no sequence")
    return value


@operator("SequenceConstruct")
def construct(call: NodeCall, *values: Operand) -> list[Any]:
    """Make a sequence."""
    return list(values)


@operator("SequenceEmpty")
def empty(call: NodeCall) -> list[Any]:
    """Make an empty sequence."""
    return []


@operator("SequenceAt")
def at(call: NodeCall, sequence: Operand, position: Operand) -> Any:
    """Return an element."""
    return _list(call, sequence)[int(call.number(position))]


@operator("SequenceInsert")
def insert(call: NodeCall, sequence: Operand, value: Operand, position: Operand = None) -> list[Any]:
    """Return a sequence with one more element."""
    made = list(_list(call, sequence))
    made.insert(len(made) if position is None else int(call.number(position)), value)
    return made


@operator("SequenceErase")
def erase(call: NodeCall, sequence: Operand, position: Operand = None) -> list[Any]:
    """Return a sequence without an element."""
    made = list(_list(call, sequence))
    del made[-1 if position is None else int(call.number(position))]
    return made


@operator("SequenceLength")
def length(call: NodeCall, sequence: Operand) -> torch.Tensor:
    """Count."""
    return torch.tensor(len(_list(call, sequence)))


@operator("ConcatFromSequence")
def concat(call: NodeCall, sequence: Operand) -> torch.Tensor:
    """Join the elements along an axis, which may be new."""
    tensors = [call.tensor(value) for value in _list(call, sequence)]
    return (torch.stack if call.attribute("new_axis", 0) else torch.cat)(tensors, call.attribute("axis"))


@operator("SplitToSequence")
def split(call: NodeCall, x: Operand, sizes: Operand = None) -> list[Any]:
    """Cut along an axis."""
    tensor, axis = call.tensor(x), call.attribute("axis", 0)
    if sizes is None:
        parts = list(tensor.split(1, axis))
        return parts if call.attribute("keepdims", 1) else [part.squeeze(axis) for part in parts]
    scalar = call.tensor(sizes).ndim == 0
    return list(tensor.split(call.ints(sizes)[0] if scalar else call.ints(sizes), axis))


@operator("SequenceMap")
def map_(call: NodeCall, sequence: Operand, *others: Operand) -> Any:
    """Run a graph on each element."""
    count, results = len(_list(call, sequence)), []
    for i in range(count):
        given = [value[i] if isinstance(value, list) else value for value in (sequence, *others)]
        results.append(call.run_body(call.attribute("body"), given))
    return tuple([result[k] for result in results] for k in range(len(call.node.outputs)))


@operator("Optional", "OptionalGetElement")
def optional(call: NodeCall, value: Operand = None) -> Any:
    """Return the value."""
    return value


@operator("OptionalHasElement")
def has_element(call: NodeCall, value: Operand = None) -> torch.Tensor:
    """Say whether there is a value."""
    return torch.tensor(value is not None)


@operator("ReverseSequence")
def reverse_sequence(call: NodeCall, x: Operand, lengths: Operand) -> torch.Tensor:
    """Reverse the beginning of each sequence of a batch."""
    tensor, time, batch = call.tensor(x), call.attribute("time_axis", 0), call.attribute("batch_axis", 1)
    steps = torch.arange(tensor.shape[time])
    ends = call.tensor(lengths).unsqueeze(-1)
    places = torch.where(steps < ends, ends - 1 - steps, steps)  # by batch, then time
    if time < batch:
        places = places.T
    places = places.reshape([*places.shape, *[1] * (tensor.ndim - 2)]).expand_as(tensor)
    return torch.gather(tensor, time, places)
