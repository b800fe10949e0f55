"""Small valid graphs of odd structure: outputs, names, omitted values, shapes, metadata, functions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tests.support.onnx_models.case import Arrays, Graph, value

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
