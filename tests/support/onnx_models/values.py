"""Small valid graphs of odd values: casts of the author, constants, masks, extreme numbers, other types."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from tests.support.onnx_models.case import Graph, tensor
from tests.support.onnx_models.structure import WIDTH, Cases, Made, linear, register, row, square

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
VALUES: Cases = {}


@register(VALUES)
def tied_weight() -> Made:
    """One user overflows in float16, the other does not."""
    graph = linear()
    graph.keep("large", 1e5)
    graph.add("Mul", "h large", "scaled")
    graph.add("MatMul", "scaled w", "overflows")
    graph.add("Div", "overflows large", "y")
    return graph.model("y"), graph.inputs


@register(VALUES)
def cast_from_int() -> Made:
    graph = linear(ids=np.array([[1, 2, 3, 70000], [5, 6, 7, 8]], np.int64))
    graph.add("Cast", "ids", "numbers", to=FLOAT)
    graph.keep("many", 1e5)
    graph.add("Div", "numbers many", "shares")
    graph.add("Add", "h shares", "y")
    return graph.model("y"), graph.inputs


@register(VALUES)
def cast_from_half() -> Made:
    """A file that is partly in float16 already: its author goes back to float32 for a square."""
    graph = Graph({"x": row(scale=300)})
    graph.keep("w", square().astype(np.float16), np.float16)
    graph.add("Cast", "x", "narrow", to=HALF)
    graph.add("Add", "narrow narrow", "twice")
    graph.add("Cast", "twice", "wide", to=FLOAT)
    graph.add("Mul", "wide wide", "squares")
    graph.keep("large", 1e5)
    graph.add("Div", "squares large", "small")
    graph.add("Cast", "small", "narrow_again", to=HALF)
    graph.add("MatMul", "narrow_again w", "product")
    graph.add("Cast", "product", "y", to=FLOAT)
    return graph.model("y"), graph.inputs


@register(VALUES)
def cast_like() -> Made:
    graph = linear(ids=np.ones((2, WIDTH), np.int64))
    graph.add("CastLike", "ids h", "numbers")
    graph.add("Add", "h numbers", "y")
    return graph.model("y"), graph.inputs


@register(VALUES)
def double_inside() -> Made:
    graph = linear()
    graph.add("Cast", "h", "wide", to=TensorProto.DOUBLE)
    graph.keep("third", 1 / 3, np.float64)
    graph.add("Mul", "wide third", "shares")
    graph.add("Cast", "shares", "y", to=FLOAT)
    return graph.model("y"), graph.inputs


@register(VALUES)
def constant_attributes() -> Made:
    graph = linear()
    graph.add("Constant", "", "number", value_float=2.0)
    graph.add("Constant", "", "numbers", value_floats=[1.0, 2.0, 3.0, 4.0])
    graph.add("Constant", "", "axes", value_ints=[1])
    graph.add("Constant", "", "axis", value_int=0)
    graph.add("Mul", "h number", "twice")
    graph.add("Add", "twice numbers", "sum")
    graph.add("ReduceMean", "sum axes", "mean")
    graph.add("Gather", "mean axis", "y")
    for made in graph.nodes:
        made.input[:] = [] if made.op_type == "Constant" else made.input
    return graph.model("y"), graph.inputs


@register(VALUES)
def constant_of_shape() -> Made:
    graph = linear()
    graph.add("Shape", "h", "shape")
    graph.add("ConstantOfShape", "shape", "filled", value=tensor("value", [1e-9]))
    graph.add("Add", "h filled", "y")
    return graph.model("y"), graph.inputs


@register(VALUES)
def extreme_initializers() -> Made:
    """Numbers that float16 overflows, flushes, or keeps exactly, in each way a file may hold them."""
    graph = linear()
    graph.initializers.append(
        helper.make_tensor("weights", FLOAT, [WIDTH], [65504.0, 65519.0, 65520.0, 1e30])
    )
    graph.keep("tiny", [6e-8, 2e-8, -1e-8, -0.0])
    graph.keep("infinite", [-np.inf, 0.0, 0.0, 0.0])
    graph.add("Div", "h weights", "small")
    graph.add("Add", "small tiny", "sum")
    graph.add("Add", "sum infinite", "masked")
    graph.add("Softmax", "masked", "y", axis=-1)
    return graph.model("y"), graph.inputs


@register(VALUES)
def strings_and_integers() -> Made:
    words = np.array([["a", "b", "c", "d"], ["e", "f", "g", "h"]], dtype=object)
    graph = linear(words=words, ids=np.array([1, 0], np.int64))
    graph.add("Identity", "words", "same_words")
    graph.add("Gather", "h ids", "picked", axis=0)
    graph.add("Gather", "words ids", "picked_words", axis=0)
    outputs = {"picked": FLOAT, "same_words": TensorProto.STRING, "picked_words": TensorProto.STRING}
    return graph.model(outputs), graph.inputs


@register(VALUES)
def scalars() -> Made:
    graph = Graph({"x": np.array(3.0, np.float32)})
    graph.keep("two", 2.0)
    graph.add("Pow", "x two", "y")
    return graph.model("y"), graph.inputs


@register(VALUES)
def old_opset() -> Made:
    """Ops of opset 12 have no bfloat16 yet; the meaning of Softmax changes with 13."""
    graph = Graph({"x": row()}, opset=12)
    graph.keep("w", square())
    graph.add("MatMul", "x w", "h")
    graph.add("Softmax", "h", "p", axis=1)
    graph.add("ReduceSum", "p", "y", axes=[1], keepdims=1)
    return graph.model("y p"), graph.inputs


@register(VALUES)
def quantized() -> Made:
    graph = linear()
    graph.keep("step", 0.05), graph.keep("zero", 0, np.int8)
    graph.add("QuantizeLinear", "h step zero", "q")
    graph.add("DequantizeLinear", "q step zero", "y")
    return graph.model("y"), graph.inputs


@register(VALUES)
def two_masks_on_a_padded_row() -> Made:
    """The sum of two clamped masks is -inf; where that is all of a row, softmax gives NaN."""
    graph = linear(keep=np.array([[True] * WIDTH, [False] * WIDTH]))
    graph.keep("zero", 0.0), graph.keep("lowest", float(np.finfo(np.float32).min)), graph.keep("large", -1e9)
    graph.add("Where", "keep zero lowest", "padding")
    graph.add("Where", "keep zero large", "more_padding")
    graph.add("Add", "h padding", "masked")
    graph.add("Add", "masked more_padding", "masked_twice")
    graph.add("Softmax", "masked_twice", "y", axis=-1)
    return graph.model("y"), graph.inputs


@register(VALUES)
def mask_times_zero() -> Made:
    """A mask made by a product: where float16 holds -inf for the constant, 0 * -inf is NaN."""
    graph = linear(keep=np.array([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]], np.float32))
    graph.keep("one", 1.0), graph.constant("lowest", float(np.finfo(np.float32).min))
    graph.add("Sub", "one keep", "dropped")
    graph.add("Mul", "dropped lowest", "mask")
    graph.add("Add", "h mask", "masked")
    graph.add("Softmax", "masked", "y", axis=-1)
    return graph.model("y"), graph.inputs


@register(VALUES)
def large_data_constants() -> Made:
    """Numbers beyond float16 that are data, which must not be clamped: 1e6 divides, -1e5 is an offset."""
    graph = linear()
    graph.constant("million", 1e6), graph.keep("offset", np.full(WIDTH, -1e5))
    graph.add("Mul", "h million", "large")
    graph.add("Add", "large offset", "moved")
    graph.add("Div", "moved million", "y")
    return graph.model("y"), graph.inputs
