"""Control flow, executed along the path that the inputs take, and operators on sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ampaudit.source.onnx.files import torch_dtype_of
from ampaudit.source.onnx.values import Known, NodeCall, Operand, Unsupported, operator
from ampaudit.trace.internals import without_modes


def _known(value: bool | int) -> Known:
    with without_modes():
        real = torch.tensor(value)
    return Known(real, lambda: torch.tensor(value))


@operator("If")
def if_(call: NodeCall, condition: Operand) -> Any:
    """Run the branch that the condition selects."""
    return tuple(call.run_body(call.attribute(f"{'then' if call.number(condition) else 'else'}_branch"), []))


@operator("Loop")
def loop(call: NodeCall, limit: Operand = None, condition: Operand = None, *carried: Operand) -> Any:
    """Run the body repeatedly.

    Its condition input is the constant true, so a body that returns it unchanged reads no traced value.
    """
    body, values, rows = call.attribute("body"), list(carried), []
    limits = None if limit is None else int(call.number(limit))
    going = True if condition is None else bool(call.number(condition))
    count = 0
    while going and (limits is None or count < limits):
        condition, *results = call.run_body(body, [_known(count), _known(True), *values])
        values, row = results[: len(values)], results[len(values) :]
        rows.append([call.tensor(value) for value in row])
        count += 1
        if limits is None or count < limits:
            going = bool(call.number(condition))
    columns = [torch.stack(list(column)) for column in zip(*rows, strict=True)]
    if not rows:
        columns = [_no_rows(output) for output in list(body.outputs)[1 + len(values) :]]
    return (*values, *columns)


@operator("Scan")
def scan(call: NodeCall, *inputs: Operand) -> Any:
    """Run the body on each slice of the scanned inputs."""
    if call.version < 9:
        raise Unsupported("Scan before version 9 is not supported")
    body, count = call.attribute("body"), call.attribute("num_scan_inputs")
    values, scanned = list(inputs[:-count]), [call.tensor(value) for value in inputs[-count:]]
    axes = call.attribute("scan_input_axes") or [0] * count
    backwards = call.attribute("scan_input_directions") or [0] * count
    length, rows = scanned[0].shape[axes[0]], []
    for step in range(length):
        places = [length - 1 - step if back else step for back in backwards]
        slices = [t.select(axis, place) for t, axis, place in zip(scanned, axes, places, strict=True)]
        results = call.run_body(body, [*values, *slices])
        values, row = results[: len(values)], results[len(values) :]
        rows.append([call.tensor(value) for value in row])
    width = len(call.node.outputs) - len(values)
    out_axes = call.attribute("scan_output_axes") or [0] * width
    out_backwards = call.attribute("scan_output_directions") or [0] * width
    columns = [
        torch.stack(list(column)[::-1] if back else list(column), axis)
        for column, back, axis in zip(zip(*rows, strict=True), out_backwards, out_axes, strict=True)
    ]
    return (*values, *columns)


def _no_rows(output: Any) -> Tensor:
    """Return the scan output of a loop that runs no iteration."""
    sizes = [size if isinstance(size, int) else 0 for size in (output.shape or ())]
    dtype = torch_dtype_of(output.dtype) if output.dtype is not None else None
    return torch.empty([0, *sizes], dtype=dtype)


def _list(call: NodeCall, value: Operand) -> list[Any]:
    if not isinstance(value, list):
        raise Unsupported("an input is not a sequence")
    return value


@operator("SequenceConstruct", "SequenceEmpty")
def construct(call: NodeCall, *values: Operand) -> list[Any]:
    """Return a sequence of the inputs."""
    return list(values)


@operator("SequenceAt")
def at(call: NodeCall, sequence: Operand, position: Operand) -> Any:
    """Return an element."""
    return _list(call, sequence)[int(call.number(position))]


@operator("SequenceInsert")
def insert(call: NodeCall, sequence: Operand, value: Operand, position: Operand = None) -> list[Any]:
    """Return a sequence with an element inserted."""
    result = list(_list(call, sequence))
    result.insert(len(result) if position is None else int(call.number(position)), value)
    return result


@operator("SequenceErase")
def erase(call: NodeCall, sequence: Operand, position: Operand = None) -> list[Any]:
    """Return a sequence with an element removed."""
    result = list(_list(call, sequence))
    del result[-1 if position is None else int(call.number(position))]
    return result


@operator("SequenceLength")
def length(call: NodeCall, sequence: Operand) -> Tensor:
    """Return the number of elements."""
    return torch.tensor(len(_list(call, sequence)))


@operator("ConcatFromSequence")
def concat(call: NodeCall, sequence: Operand) -> Tensor:
    """Concatenate the elements along an axis, or stack them along a new one."""
    tensors = [call.tensor(value) for value in _list(call, sequence)]
    return (torch.stack if call.attribute("new_axis", 0) else torch.cat)(tensors, call.attribute("axis"))


@operator("SplitToSequence")
def split(call: NodeCall, x: Tensor, sizes: Operand = None) -> list[Any]:
    """Split along an axis into a sequence."""
    axis = call.attribute("axis", 0)
    if sizes is None:
        parts = list(x.split(1, axis))
        return parts if call.attribute("keepdims", 1) else [part.squeeze(axis) for part in parts]
    scalar = call.tensor(sizes).ndim == 0
    return list(x.split(call.ints(sizes)[0] if scalar else call.ints(sizes), axis))


@operator("SequenceMap")
def map_(call: NodeCall, sequence: Operand, *others: Operand) -> Any:
    """Run the body on each element."""
    count, results = len(_list(call, sequence)), []
    for i in range(count):
        elements = [value[i] if isinstance(value, list) else value for value in (sequence, *others)]
        results.append(call.run_body(call.attribute("body"), elements))
    return tuple([result[k] for result in results] for k in range(len(call.node.outputs)))


@operator("Optional", "OptionalGetElement")
def optional(call: NodeCall, value: Operand = None) -> Any:
    """Return the value."""
    return value


@operator("OptionalHasElement")
def has_element(call: NodeCall, value: Operand = None) -> Tensor:
    """Return whether there is a value."""
    return torch.tensor(value is not None)


@operator("ReverseSequence")
def reverse_sequence(call: NodeCall, tensor: Tensor, lengths: Tensor) -> Tensor:
    """Reverse the first elements of each sequence of a batch, as many as its length."""
    time, batch = call.attribute("time_axis", 0), call.attribute("batch_axis", 1)
    steps, ends = torch.arange(tensor.shape[time]), lengths.unsqueeze(-1)
    places = torch.where(steps < ends, ends - 1 - steps, steps)  # by batch, then time
    if time < batch:
        places = places.T
    places = places.reshape([*places.shape, *[1] * (tensor.ndim - 2)]).expand_as(tensor)
    return torch.gather(tensor, time, places)
