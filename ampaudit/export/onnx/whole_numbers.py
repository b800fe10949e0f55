"""Finds ops that need float32 because they compute with integers.

Positions, counts, sizes and labels are integers that become floats. Float16 represents all integers up to
2^11 (bfloat16: 2^8) and few larger ones, so results that are right on short inputs can be wrong on longer
ones. Types, shapes and constants bound an integer. An integer that may be too large stays in float32 until it
is used (as an index, in a comparison, as a divisor), is bounded (by a sine), or is combined with numbers that
the model computes from its floating-point inputs and weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import torch

from ampaudit.core.formats import NumberFormat
from ampaudit.export.onnx.types import CHOOSING, COMPARING, MOVING, TensorOf, constant_of, is_float32
from ampaudit.source.onnx.names import bodies_of, is_constant

_MAX_ELEMENTS = 1 << 16  # size up to which a constant is read; larger ones are weights
_ANGLE_ERROR = 0.1  # acceptable error of an angle in radians
_JOINING = {"Concat", "Max", "Min", "ScatterElements", "ScatterND", "Where"}
_KEEPING = {"Abs", "Cast", "CastLike", "Identity", "Neg", "ReduceMax", "ReduceMin", "Relu"}
_ROUNDING = {"Ceil", "Floor", "Round"}
_ARITHMETIC = {"Add", "Div", "Mod", "Mul", "Sub", "Clip"} | _KEEPING | _JOINING | _ROUNDING | MOVING
_PRODUCTS = {"Conv", "ConvTranspose", "DeformConv", "GRU", "Gemm", "LSTM", "MatMul", "RNN"}
_BOUNDED = {"Cos", "Erf", "HardSigmoid", "LogSoftmax", "Sigmoid", "Sign", "Sin", "Softmax", "Tanh"}
_SIZING = {"OneHot", "Range", "Resize", "Upsample"}  # read sizes or scales


@dataclass(frozen=True, slots=True)
class _Number:
    """Properties of the elements of a tensor."""

    peak: float = math.inf  # bound on their magnitudes
    whole: bool = False  # they are integers
    counted: bool = False  # they are computed from variable integers, or accumulated, like phases
    grows: bool = False  # they grow with the length of an input
    varies: bool = False  # they are computed from floating-point inputs or weights
    plain: bool = False  # they are integers without arithmetic, rounded at most once

    def fits(self, form: NumberFormat) -> bool:
        """Return whether a format represents each of them exactly and distinctly."""
        return self.whole and self.peak < 2.0 ** (form.fraction_bits + 1)


_REAL = _Number(varies=True)


def whole_number_nodes(model: ir.Model, form: NumberFormat, tensor_of: TensorOf) -> set[ir.Node]:
    """Return the nodes that compute with integers that the format may round.

    The model has the types of its values, and shapes as far as they are known.
    """
    numbers = _Numbers(form, tensor_of)
    numbers.visit(model.graph)
    for value in model.graph.outputs:
        number = numbers.of(value)
        if number.counted and not number.varies and not number.fits(form):
            numbers.needed.append(value)
    return numbers.exact_nodes()


class _Numbers:
    """Propagates properties of numbers through a graph."""

    def __init__(self, form: NumberFormat, tensor_of: TensorOf) -> None:
        self.needed: list[ir.Value] = []  # values that must be exact
        self.nodes: set[ir.Node] = set()  # nodes that read a needed value
        self._form = form
        self._tensor_of = tensor_of
        self._known: dict[ir.Value, _Number] = {}
        self._from: dict[ir.Value, list[ir.Value]] = {}  # sources of the inputs and outputs of bodies

    def visit(self, graph: ir.Graph) -> None:
        """Derive the properties of a graph's values in order, and collect the values that must be exact."""
        for node in graph:
            if is_constant(node):
                continue
            inputs = [_REAL if value is None else self.of(value) for value in node.inputs]
            bodies = list(bodies_of(node))
            for body in bodies:
                self._enter(node, body)
                self.visit(body)
            for value, is_needed in zip(node.inputs, _needs(node, inputs, self._form), strict=True):
                if is_needed and value is not None:
                    self.needed.append(value)
                    self.nodes.add(node)
            results = (
                self._returned(node, bodies) if bodies else [] if node.domain else _results(node, inputs)
            )
            for place, value in enumerate(node.outputs):
                number = results[min(place, len(results) - 1)] if results else _REAL
                self._known[value] = self._limited(value, number)

    def of(self, value: ir.Value) -> _Number:
        """Return the properties of a value, which come from its node, its constant or its type."""
        if value not in self._known:
            node = value.producer()
            default = None if value.is_graph_input() else value.const_value
            stored = constant_of(node) if node is not None and is_constant(node) else default
            if stored is None:
                self._known[value] = self._limited(value, _REAL)
            elif stored.size > _MAX_ELEMENTS or stored.dtype == ir.DataType.STRING:
                self._known[value] = _REAL
            else:
                self._known[value] = _constant(self._tensor_of(stored), self._form)
        return self._known[value]

    def _limited(self, value: ir.Value, number: _Number) -> _Number:
        """Bound integers by their type, and by the table in which they are indices."""
        kind = value.dtype
        if kind is None or not (kind.is_integer() or kind == ir.DataType.BOOL):
            return number
        integer = number if number.counted else _Number(whole=True, counted=True, plain=True)
        most = min((_largest(kind), *(_rows_read(use.node, use.idx) for use in value.uses())))
        return replace(integer, peak=min(integer.peak, most), whole=True, varies=False)

    def _enter(self, node: ir.Node, body: ir.Graph) -> None:
        """Pass the iteration number and the state of a Loop to its body."""
        if node.op_type != "Loop":
            return
        for place, value in enumerate(body.inputs):
            initial = node.inputs[place] if place < len(node.inputs) else None
            if place == 0:
                self._known[value] = _Number(whole=True, counted=True, grows=True, plain=True)
            elif place > 1 and initial is not None:
                state = self.of(initial)
                counts = not state.varies  # by an amount per iteration
                self._known[value] = replace(state, peak=math.inf, counted=counts, grows=counts, plain=False)
                self._from[value] = [initial, body.outputs[place - 1]]

    def _returned(self, node: ir.Node, bodies: Sequence[ir.Graph]) -> list[_Number]:
        """Join what the bodies of an If or a Loop return."""
        skipped = {"If": 0, "Loop": 1}.get(node.op_type)  # a Loop does not return its condition
        if skipped is None:
            return []
        results = []
        for place, value in enumerate(node.outputs):
            self._from[value] = [body.outputs[place + skipped] for body in bodies]
            results.append(_joined([self.of(output) for output in self._from[value]]))
        return results

    def exact_nodes(self) -> set[ir.Node]:
        """Return the nodes that need exact numbers, and those that produce them."""
        nodes = set(self.nodes)
        # values, and whether a CumSum adds up their errors
        pending = [(value, False) for value in self.needed]
        visited: set[tuple[ir.Value, bool]] = set()
        while pending:
            value, adds_up = pending.pop()
            if (value, adds_up) in visited:
                continue
            visited.add((value, adds_up))
            pending += [(source, False) for source in self._from.get(value, ())]
            producer = value.producer()
            if producer is None or is_constant(producer) or not is_float32(value):
                continue
            adds_up = adds_up and producer.op_type in _ARITHMETIC
            if self.of(value).counted or adds_up:
                nodes.add(producer)
                adds_up = adds_up or producer.op_type == "CumSum"
                pending += [(source, adds_up) for source in producer.inputs if source is not None]
        return nodes


def _constant(tensor: torch.Tensor, form: NumberFormat) -> _Number:
    """Return the properties of a constant.

    A table with more distinct integers than the format represents is assumed to hold positions. An audit sees
    only the first of them.
    """
    values = tensor.double()
    peak = float(values.abs().amax()) if values.numel() else 0.0
    if not math.isfinite(peak):
        return _Number()
    number = _Number(peak, bool((values == values.floor()).all()), plain=True)
    table = number.whole and values.unique().numel() > 2 ** (form.fraction_bits + 1)
    return replace(number, counted=True, grows=True) if table else number


def _largest(kind: ir.DataType) -> float:
    """Return the largest magnitude of a small integer type."""
    if kind == ir.DataType.BOOL:
        return 1.0
    return float(np.iinfo(kind.numpy()).max) + 1 if kind.bitwidth <= 16 else math.inf


def _rows_read(node: ir.Node | None, place: int) -> float:
    """Return the number of rows of the table that an input indexes; infinity if it is not an index."""
    if node is None or node.op_type != "Gather" or place != 1:
        return math.inf
    return _size(node.inputs[0], node.attributes.get_int("axis", 0))


def _size(value: ir.Value | None, axis: int) -> float:
    """Return the size of an axis; infinity if it is not known."""
    shape = None if value is None else value.shape
    if shape is None or not -len(shape) <= axis < len(shape):
        return math.inf
    size = shape[axis]
    return float(size) if isinstance(size, int) else math.inf


def _sizes(value: ir.Value | None) -> list[float]:
    """Return the size of each axis, with infinity for an unknown one, or for all if the rank is unknown."""
    shape = None if value is None else value.shape
    return [math.inf] if shape is None else [_size(value, axis) for axis in range(len(shape))]


def _product(factors: Sequence[float]) -> float:
    return 0.0 if 0.0 in factors else math.prod(factors)


def _count(most: float) -> _Number:
    """Return the properties of a number of elements, or of an index, up to ``most``."""
    return _Number(most, whole=True, counted=True, grows=most == math.inf, plain=True)


def _joined(numbers: Sequence[_Number]) -> _Number:
    return _Number(
        max((number.peak for number in numbers), default=math.inf),
        whole=all(number.whole for number in numbers),
        counted=any(number.counted for number in numbers),
        grows=any(number.grows for number in numbers),
        varies=any(number.varies for number in numbers),
        plain=all(number.plain for number in numbers),
    )


def _results(node: ir.Node, inputs: Sequence[_Number]) -> list[_Number]:
    """Return the properties of a standard node's outputs."""
    op, first = node.op_type, inputs[0] if inputs else _Number()
    data = node.inputs[0] if node.inputs else None
    joined = replace(_joined(inputs), plain=False)
    peaks = [number.peak for number in inputs]
    match op:
        case "Shape":
            return [_count(max(_sizes(data), default=0.0))]
        case "Size" | "NonZero":
            return [_count(_product(_sizes(data)))]
        case "ArgMax" | "ArgMin":
            return [_count(_size(data, node.attributes.get_int("axis", 0)))]
        case "TopK":
            return [first, _count(_size(data, node.attributes.get_int("axis", -1)))]
        case "Range":
            peak = max(peaks[:2], default=math.inf)
            return [replace(joined, peak=peak, counted=True, grows=peak == math.inf, plain=True)]
        case "ConstantOfShape":
            stored = (
                node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1)
            )
            return [
                _Number(float(np.abs(stored.astype(float)).max()), bool((stored == stored.round()).all()))
            ]
        case "CumSum":
            peak = _product([first.peak, *_sizes(data)])
            return [
                replace(first, peak=peak, counted=True, grows=peak == math.inf, varies=False, plain=False)
            ]
        case "ReduceSum":
            grows = first.grows or (first.counted and not first.varies and math.inf in _sizes(data))
            return [replace(first, peak=_product([first.peak, *_sizes(data)]), grows=grows, plain=False)]
        case "Add" | "Sub" | "Sum":
            return [replace(joined, peak=sum(peaks))]
        case "Clip":
            limits = [number.peak for number in inputs[1:] if not number.varies and not number.counted]
            return [replace(joined, peak=max(limits) if len(limits) == 2 else math.inf)]
        case "Pad":
            return [_joined([first, *inputs[2:3]])]
        case "Mod":
            return [replace(joined, peak=peaks[-1])]
        case "DequantizeLinear":
            return [_REAL]
        case "Div" if data is not None and data.dtype is not None and data.dtype.is_integer():
            return [replace(first, plain=False)]
    if op in _BOUNDED:
        return [_Number(1.0, whole=op == "Sign")] if not joined.varies else [_REAL]
    if op in _KEEPING or op in _ROUNDING:
        return [replace(first, peak=first.peak + 1, whole=True) if op in _ROUNDING else first]
    if op in _JOINING:
        return [
            _joined(inputs[1:] if op == "Where" else [inputs[0], *inputs[2:]] if "Scatter" in op else inputs)
        ]
    if op in MOVING:
        return [first]
    if joined.varies or (op in _PRODUCTS and not joined.grows and _size(data, -1) != 1):
        return [_REAL]
    return [
        replace(joined, peak=_product(peaks) if op == "Mul" else math.inf, whole=op == "Mul" and joined.whole)
    ]


def _needs(node: ir.Node, inputs: Sequence[_Number], form: NumberFormat) -> Iterator[bool]:
    """Yield for each input whether it must be exact and may not be in the format."""
    op = node.op_type
    output = node.outputs[0] if node.outputs else None
    to_integer = op == "Cast" and output is not None and output.dtype is not None and not is_float32(output)
    alone = not any(number.varies for number in inputs)
    for place, number in enumerate(inputs):
        others = [other for index, other in enumerate(inputs) if index != place]
        if not number.counted or not is_float32(node.inputs[place]) or number.fits(form):
            yield False
        elif to_integer or op in _SIZING or op == "NonMaxSuppression":
            yield True
        elif op in _ROUNDING:
            yield not number.whole
        elif op in COMPARING:
            # one rounding keeps the order, so that a comparison with an exactly represented number is safe
            yield not (number.plain and number.whole and all(other.fits(form) for other in others))
        elif op in ("Sin", "Cos"):
            yield number.peak * form.eps / 2 > _ANGLE_ERROR
        elif op in CHOOSING:
            yield not number.varies
        elif op == "Div" and place == 1 and not alone:
            yield number.grows and number.peak > form.max
        elif op in ("LogSoftmax", "Softmax"):
            yield number.grows
        else:
            yield number.grows and alone and op not in MOVING
