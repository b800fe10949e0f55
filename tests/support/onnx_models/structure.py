"""Small valid graphs of odd structure without bodies: names, casts, constants, omitted values, types."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tests.support.onnx_models.case import Arrays, Graph, tensor, value

__all__ = ["STRUCTURE", "WIDTH", "Cases", "Made", "linear", "register", "row"]

FLOAT, HALF, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64
Made = tuple[onnx.ModelProto, Arrays]
Cases = dict[str, Callable[[], Made]]
STRUCTURE: Cases = {}
WIDTH = 4


def register(cases: Cases) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def decorate(function: Callable[[], Made]) -> Callable[[], Made]:
        cases[function.__name__] = function
        return function

    return decorate


def row(*, seed: int = 0, scale: float = 1.0) -> NDArray:
    return np.random.default_rng(seed).standard_normal((2, WIDTH), dtype=np.float32) * np.float32(scale)


def square(*, seed: int = 1, scale: float = 1.0) -> NDArray:
    return np.random.default_rng(seed).standard_normal((WIDTH, WIDTH), dtype=np.float32) * np.float32(scale)


def linear(**inputs: NDArray) -> Graph:
    """Begin with ``h = x @ w``."""
    graph = Graph({"x": row(), **inputs})
    graph.keep("w", square())
    graph.add("MatMul", "x w", "h")
    return graph


@register(STRUCTURE)
def output_read_inside() -> Made:
    graph = linear()
    graph.add("Tanh", "h", "y")
    return graph.model("h y"), graph.inputs


@register(STRUCTURE)
def output_is_input_or_initializer() -> Made:
    graph = linear()
    graph.add("Relu", "h", "y")
    return graph.model("y x w", x=(2, WIDTH), w=(WIDTH, WIDTH)), graph.inputs


@register(STRUCTURE)
def initializer_is_input() -> Made:
    """An initializer that callers may override, as files of IR version 3 have them."""
    graph = linear()
    model = graph.model("h")
    model.graph.input.append(value("w", (WIDTH, WIDTH)))
    return model, graph.inputs


@register(STRUCTURE)
def tied_weight() -> Made:
    """One user overflows in float16, the other does not."""
    graph = linear()
    graph.keep("large", 1e5)
    graph.add("Mul", "h large", "scaled")
    graph.add("MatMul", "scaled w", "overflows")
    graph.add("Div", "overflows large", "y")
    return graph.model("y"), graph.inputs


@register(STRUCTURE)
def cast_from_int() -> Made:
    graph = linear(ids=np.array([[1, 2, 3, 70000], [5, 6, 7, 8]], np.int64))
    graph.add("Cast", "ids", "numbers", to=FLOAT)
    graph.keep("many", 1e5)
    graph.add("Div", "numbers many", "shares")
    graph.add("Add", "h shares", "y")
    return graph.model("y"), graph.inputs


@register(STRUCTURE)
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


@register(STRUCTURE)
def cast_like() -> Made:
    graph = linear(ids=np.ones((2, WIDTH), np.int64))
    graph.add("CastLike", "ids h", "numbers")
    graph.add("Add", "h numbers", "y")
    return graph.model("y"), graph.inputs


@register(STRUCTURE)
def double_inside() -> Made:
    graph = linear()
    graph.add("Cast", "h", "wide", to=TensorProto.DOUBLE)
    graph.keep("third", 1 / 3, np.float64)
    graph.add("Mul", "wide third", "shares")
    graph.add("Cast", "shares", "y", to=FLOAT)
    return graph.model("y"), graph.inputs


@register(STRUCTURE)
def unnamed_nodes() -> Made:
    graph = linear()
    graph.add("Relu", "h", "r", name="")
    graph.add("Exp", "r", "y", name="")
    graph.nodes[0].ClearField("name")
    return graph.model("y"), graph.inputs


@register(STRUCTURE)
def duplicate_node_names() -> Made:
    graph = linear()
    graph.add("Relu", "h", "r", name="same")
    graph.add("Exp", "r", "y", name="same")
    return graph.model("y"), graph.inputs


@register(STRUCTURE)
def names_that_casts_would_take() -> Made:
    graph = Graph({"x": row()})
    graph.keep("w", square()), graph.keep("w_cast_to_float16", square(seed=2))
    graph.add("MatMul", "x w", "x_cast_to_float16", name="x_cast_to_float32")
    graph.add("MatMul", "x_cast_to_float16 w_cast_to_float16", "x_cast_to_float32", name="x_cast_to_float16")
    graph.add("Relu", "x_cast_to_float32", "y_cast_to_float32")
    graph.add("Tanh", "y_cast_to_float32", "y")
    return graph.model("y y_cast_to_float32"), graph.inputs


@register(STRUCTURE)
def empty_optional_inputs() -> Made:
    graph = linear()
    graph.keep("most", 1.0), graph.keep("sizes", [2, 8], np.int64)
    graph.add("Clip", "h _ most", "clipped")
    graph.add("Resize", "clipped _ _ sizes", "wider", mode="nearest")
    graph.add("Clip", "wider _ _", "y")
    return graph.model("y"), graph.inputs


@register(STRUCTURE)
def empty_outputs() -> Made:
    graph = linear()
    graph.keep("scale", np.ones(WIDTH)), graph.keep("first", [0], np.int64)
    graph.keep("input_weights", np.full((1, 4 * WIDTH, WIDTH), 0.1))
    graph.keep("state_weights", np.full((1, 4 * WIDTH, WIDTH), -0.1))
    graph.add("LayerNormalization", "h scale", "norm _ deviation", axis=-1)
    graph.nodes[-1].output[1] = ""
    graph.add("Unsqueeze", "norm first", "sequence")
    recurrent = "sequence input_weights state_weights _ _ _ _"
    graph.add("LSTM", recurrent, "_ last", name="recurrent", hidden_size=WIDTH)
    graph.nodes[-1].output[0] = ""
    return graph.model("norm deviation last"), graph.inputs


@register(STRUCTURE)
def unused_values() -> Made:
    graph = linear(spare=row(seed=5))
    graph.keep("unused", np.ones(3)), graph.keep("unused_large", 1e6)
    graph.add("Exp", "h", "dead")
    graph.add("Dropout", "h", "kept mask")
    return graph.model("kept"), graph.inputs


@register(STRUCTURE)
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


@register(STRUCTURE)
def constant_of_shape() -> Made:
    graph = linear()
    graph.add("Shape", "h", "shape")
    graph.add("ConstantOfShape", "shape", "filled", value=tensor("value", [1e-9]))
    graph.add("Add", "h filled", "y")
    return graph.model("y"), graph.inputs


@register(STRUCTURE)
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


@register(STRUCTURE)
def strings_and_integers() -> Made:
    words = np.array([["a", "b", "c", "d"], ["e", "f", "g", "h"]], dtype=object)
    graph = linear(words=words, ids=np.array([1, 0], np.int64))
    graph.add("Identity", "words", "same_words")
    graph.add("Gather", "h ids", "picked", axis=0)
    graph.add("Gather", "words ids", "picked_words", axis=0)
    outputs = {"picked": FLOAT, "same_words": TensorProto.STRING, "picked_words": TensorProto.STRING}
    return graph.model(outputs), graph.inputs


@register(STRUCTURE)
def value_info_present() -> Made:
    graph = linear()
    graph.add("Relu", "h", "r")
    graph.add("Exp", "r", "y")
    return onnx.shape_inference.infer_shapes(graph.model("y")), graph.inputs


@register(STRUCTURE)
def value_info_of_wrong_shapes() -> Made:
    model, inputs = value_info_present()
    for stale, name in zip(model.graph.value_info, ("h", "r"), strict=True):
        stale.CopyFrom(value(name, ("batch", WIDTH + 3)))
    model.graph.value_info.append(value("nobody", (7,)))
    return model, inputs


@register(STRUCTURE)
def dynamic_and_empty_dimensions() -> Made:
    graph = Graph({"x": row()[:0]})
    graph.keep("w", square())
    graph.add("MatMul", "x w", "y")
    model = graph.model("y")
    for declared in (model.graph.input[0], model.graph.output[0]):
        declared.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model, graph.inputs


@register(STRUCTURE)
def scalars() -> Made:
    graph = Graph({"x": np.array(3.0, np.float32)})
    graph.keep("two", 2.0)
    graph.add("Pow", "x two", "y")
    return graph.model("y"), graph.inputs


@register(STRUCTURE)
def old_opset() -> Made:
    """Ops of opset 12 have no bfloat16 yet; the meaning of Softmax changes with 13."""
    graph = Graph({"x": row()}, opset=12)
    graph.keep("w", square())
    graph.add("MatMul", "x w", "h")
    graph.add("Softmax", "h", "p", axis=1)
    graph.add("ReduceSum", "p", "y", axes=[1], keepdims=1)
    return graph.model("y p"), graph.inputs


@register(STRUCTURE)
def quantized() -> Made:
    graph = linear()
    graph.keep("step", 0.05), graph.keep("zero", 0, np.int8)
    graph.add("QuantizeLinear", "h step zero", "q")
    graph.add("DequantizeLinear", "q step zero", "y")
    return graph.model("y"), graph.inputs


@register(STRUCTURE)
def sequences() -> Made:
    graph = linear()
    graph.keep("one", 1, np.int64)
    graph.add("SplitToSequence", "h", "rows", axis=0)
    graph.add("SequenceAt", "rows one", "last")
    graph.add("Relu", "last", "y")
    return graph.model("y"), graph.inputs


@register(STRUCTURE)
def metadata() -> Made:
    graph = linear()
    model = graph.model("h")
    model.producer_name, model.model_version, model.doc_string = "somebody", 7, "a model"
    model.graph.doc_string, model.graph.node[0].doc_string = "a graph", "a node"
    helper.set_model_props(model, {"license": "none"})
    model.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'head', 'linear']")
    return model, graph.inputs


@register(STRUCTURE)
def local_function() -> Made:
    """A function of the file, called twice; it calls another one."""
    graph = linear()
    graph.domains = ("local",)
    opsets = [helper.make_opsetid("", graph.opset), helper.make_opsetid("local", 1)]
    double = helper.make_node("Add", ["a", "a"], ["b"], name="add")
    twice = helper.make_function("local", "Twice", ["a"], ["b"], [double], opsets)
    inner = [
        helper.make_node("Twice", ["a"], ["t"], domain="local", name="twice"),
        helper.make_node("Relu", ["t"], ["b"], name="relu"),
    ]
    graph.functions = [twice, helper.make_function("local", "TwiceRelu", ["a"], ["b"], inner, opsets)]
    graph.add("TwiceRelu", "h", "first", domain="local")
    graph.add("TwiceRelu", "first", "y", domain="local")
    return graph.model("y"), graph.inputs
