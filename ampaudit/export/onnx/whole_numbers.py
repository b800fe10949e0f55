"""Finds the ops that must compute in float32 because they compute with whole numbers.

Positions, counts, sizes and labels are integers that become floats. A 16-bit format holds all integers up
to 2^11 (bfloat16: 2^8) and few of those beyond, so that what is right on short inputs is wrong on longer
ones. Types, shapes and constants say how large an integer may be. What cannot be shown to fit stays in
float32 from where it becomes a float to where it is used (as an index, in a comparison, as a divisor) or
becomes a real number (a sine).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ampaudit.core.formats import NumberFormat
from ampaudit.export.onnx.types import MOVING, is_float32
from ampaudit.source.onnx.names import bodies_of, plain_domain

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["whole_number_nodes"]

_MOST_ELEMENTS = 1 << 16  # of a constant that is read
_ANGLE_ERROR = 0.1  # radians
_JOINING = {"Concat", "Max", "Min", "Where"}
_KEEPING = {"Abs", "Clip", "Mod", "Neg", "ReduceMax", "ReduceMin"}
_ROUNDING = {"Ceil", "Floor", "Round"}
_ORDERING = {"ArgMax", "ArgMin", "NonMaxSuppression", "TopK"}
_ARITHMETIC = {"Add", "Div", "Mod", "Mul", "Sub"} | _KEEPING | _JOINING | _ROUNDING | MOVING
_COMPARING = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"}


@dataclass(frozen=True, slots=True)
class _Number:
    """What is known of the elements of a tensor.

    Attributes:
        peak: a bound on their magnitudes.
        whole: whether they are integers.
        counted: whether they were computed from integers that are not constant, or added up, as phases are.
    """

    peak: float = math.inf
    whole: bool = False
    counted: bool = False

    @property
    def varies(self) -> bool:
        """Whether it is a real number that the model computes."""
        return not self.counted and self.peak == math.inf

    def fits(self, form: NumberFormat) -> bool:
        """Return whether a format holds each of them as it is."""
        return self.whole and self.peak <= 2.0 ** (form.fraction_bits + 1)


_REAL = _Number()


def whole_number_nodes(
    model: ir.Model, form: NumberFormat, tensor_of: Callable[[ir.TensorProtocol], torch.Tensor]
) -> set[ir.Node]:
    """Return the nodes that compute with whole numbers that the format may round to others.

    Args:
        model: with the types of its values, and their shapes as far as they are known.
        form: the 16-bit format.
        tensor_of: reads a stored tensor.
    """
    numbers: dict[ir.Value, _Number] = {}
    found: set[ir.Node] = set()
    pending: list[ir.Value] = []
    for node in _in_order(model.graph):
        seen = [_REAL if value is None else _number_of(value, numbers, tensor_of) for value in node.inputs]
        needs = zip(node.inputs, _needs(node, seen, form), strict=True)
        needed = [value for value, must in needs if must and value is not None]
        found |= {node} if needed else set()
        pending += needed
        results = _results(node, seen) if plain_domain(node.domain) == "" else []
        numbers |= zip(node.outputs, results, strict=False)
    for value in model.graph.outputs:
        number = numbers.get(value, _REAL)
        if number.counted and number.whole and not number.fits(form):
            pending.append(value)
    added: set[ir.Value] = set()  # up by a CumSum, their errors as well
    while pending:
        value = pending.pop()
        made = value.producer()
        arithmetic = value in added and made is not None and made.op_type in _ARITHMETIC
        if made is None or not is_float32(value) or not (numbers.get(value, _REAL).counted or arithmetic):
            continue
        if made not in found:
            inputs = [given for given in made.inputs if given is not None]
            pending += inputs
            added |= set(inputs) if arithmetic or made.op_type == "CumSum" else set()
        found.add(made)
    return found


def _in_order(graph: ir.Graph) -> Iterator[ir.Node]:
    for node in graph:
        yield node
        for body in bodies_of(node):
            yield from _in_order(body)


def _number_of(
    value: ir.Value,
    numbers: Mapping[ir.Value, _Number],
    tensor_of: Callable[[ir.TensorProtocol], torch.Tensor],
) -> _Number:
    """Return what is known of a value: what its producer makes, a constant, or what its type says."""
    import onnx_ir as ir

    stored = ir.convenience.get_const_tensor(value)
    if stored is not None and not value.is_graph_input():
        return _constant(tensor_of(stored)) if stored.size <= _MOST_ELEMENTS else _REAL
    if is_float32(value):
        return numbers.get(value, _REAL)
    found = numbers.get(value, _Number(whole=True, counted=True))
    most = min((_largest(value), *(_rows_read(use.node, use.idx) for use in value.uses())))
    return replace(found, peak=min(found.peak, most), whole=True)


def _constant(tensor: torch.Tensor) -> _Number:
    values = tensor.double() if tensor.dtype.is_floating_point else tensor.long()
    peak = float(values.abs().amax()) if values.numel() else 0.0
    return _Number(peak, bool((values == values.floor()).all())) if math.isfinite(peak) else _REAL


def _largest(value: ir.Value) -> float:
    """Return the largest magnitude that the type of an integer holds, if that is small."""
    import onnx_ir as ir

    if value.dtype is None or value.dtype == ir.DataType.BOOL:
        return math.inf if value.dtype is None else 1.0
    small = value.dtype.is_integer() and value.dtype.bitwidth <= 16
    return float(np.iinfo(value.dtype.numpy()).max) + 1 if small else math.inf


def _rows_read(node: ir.Node | None, place: int) -> float:
    """Return how many rows the table has in which a node's input is an index; infinity if it is none."""
    if node is None or node.op_type != "Gather" or place != 1:
        return math.inf
    return _size(node.inputs[0], _axis(node, 0))


def _axis(node: ir.Node, default: int) -> int:
    return node.attributes["axis"].as_int() if "axis" in node.attributes else default


def _size(value: ir.Value | None, axis: int) -> float:
    """Return the size of an axis; infinity if it is not known."""
    shape = None if value is None else value.shape
    if shape is None or not -len(shape) <= axis < len(shape):
        return math.inf
    size = shape[axis]
    return float(size) if isinstance(size, int) else math.inf


def _sizes(value: ir.Value | None) -> list[float]:
    """Return the size of each axis; one that is not known if not even their number is."""
    shape = None if value is None else value.shape
    return [math.inf] if shape is None else [_size(value, axis) for axis in range(len(shape))]


def _results(node: ir.Node, seen: Sequence[_Number]) -> list[_Number]:
    """Return what is known of a standard node's outputs."""
    op, first = node.op_type, seen[0] if seen else _REAL
    peaks = [number.peak for number in seen]
    data = node.inputs[0] if node.inputs else None
    whole, counted = all(number.whole for number in seen), any(number.counted for number in seen)
    match op:
        case "Shape":
            shape = data.shape if data is not None else None
            most = (
                max((_size(data, axis) for axis in range(len(shape))), default=0.0)
                if shape is not None
                else math.inf
            )
            return [_Number(most, True, True)]
        case "Size":
            return [_Number(math.prod(_sizes(data)), True, True)]
        case "ArgMax" | "ArgMin":
            return [_Number(_size(data, _axis(node, 0)), True, True)]
        case "TopK":
            return [first, _Number(_size(data, _axis(node, -1)), True, True)]
        case "NonZero":
            return [_Number(math.prod(_sizes(data)), True, True)]
        case "Range":
            return [_Number(max(peaks[:2]), whole, True)]
        case "Cast" | "Identity":
            return [first]
        case "Add" | "Sub":
            return [_Number(sum(peaks), whole, counted)]
        case "Mul" | "MatMul" | "Gemm" | "Einsum":
            if any(number.varies for number in seen):
                return [_REAL]
            terms = {"Mul": 1.0, "MatMul": _size(data, -1), "Gemm": _size(data, -1)}.get(op, math.inf)
            return [_Number(math.prod(peaks) * terms if all(peaks) else 0.0, whole, counted)]
        case "Div":
            integers = data is not None and not is_float32(data)
            exact = (
                _Number(first.peak, True, True) if integers else _Number(whole=False, counted=first.counted)
            )
            return [exact if not any(number.varies for number in seen) else _REAL]
        case "CumSum":
            return [_Number(first.peak * math.prod(_sizes(data)), first.whole, True)]
        case "ReduceSum":
            return [replace(first, peak=first.peak * math.prod(_sizes(data)))]
    if op in _ROUNDING:
        return [replace(first, peak=first.peak + 1, whole=True)]
    if op in _JOINING:
        joined = seen[1:] if op == "Where" else seen
        return [
            _Number(
                max((number.peak for number in joined), default=math.inf),
                all(number.whole for number in joined),
                any(number.counted for number in joined),
            )
        ]
    if op in MOVING and not bodies_of(node):
        return [first] * len(node.outputs)
    return [first] if op in _KEEPING else []


def _needs(node: ir.Node, seen: Sequence[_Number], form: NumberFormat) -> Iterator[bool]:
    """Return for each input whether it must be exact, and is not in the format."""
    import onnx_ir as ir

    op = node.op_type
    kind = node.outputs[0].dtype if node.outputs else None
    to_integer = op == "Cast" and kind is not None and kind.is_integer() and kind != ir.DataType.BOOL
    for place, number in enumerate(seen):
        others = [other for index, other in enumerate(seen) if index != place]
        if not number.counted or node.inputs[place] is None or not is_float32(node.inputs[place]):
            yield False
        elif to_integer or op in _ORDERING:
            yield not number.fits(form)
        elif op in _ROUNDING:
            yield not number.whole
        elif op in _COMPARING:
            # rounding keeps an order, so that comparing with a number that is held exactly is safe
            yield not (number.whole and all(other.fits(form) for other in others))
        elif op in ("Sin", "Cos"):
            yield number.peak * form.eps / 2 > _ANGLE_ERROR
        elif op == "Div" and place == 1:
            yield number.peak > form.max and others[0].varies
        else:
            yield False
