"""Small graphs in which exactly one node, whose name is known, overflows float16; each has a healthy twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from tests.support.onnx_models.case import Arrays, Graph, value

WIDTH = 16
HEALTHY = 1e-3  # the gain of the twins; one of 1 overflows


@dataclass(frozen=True)
class Planted:
    """A model, its inputs, and the name of the node that overflows (None for a healthy twin)."""

    model: onnx.ModelProto
    inputs: Arrays
    node: str | None


# each adds nodes after ``h``, which lies within -1 and 1, and returns the name of the node that overflows
PLANTED: dict[str, Callable[[Graph, float], str]] = {}


def plant(function: Callable[[Graph, float], str]) -> Callable[[Graph, float], str]:
    PLANTED[function.__name__] = function
    return function


def planted(name: str, *, healthy: bool = False) -> Planted:
    """Build ``tanh(x @ first)``, the fault, and layers after it that bring the values down again."""
    random = np.random.default_rng(7)
    graph = Graph({"x": random.standard_normal((2, WIDTH), dtype=np.float32)})
    graph.keep("first", weight(1.0))
    graph.keep("down", 2.0**-14)
    graph.add("MatMul", "x first", "linear")
    graph.add("Tanh", "linear", "h")
    node = PLANTED[name](graph, HEALTHY if healthy else 1.0)
    graph.add("Mul", f"{graph.nodes[-1].output[0]} down", "y")  # and nothing that hides an infinity
    return Planted(graph.model("y"), graph.inputs, None if healthy else node)


def weight(gain: float) -> NDArray:
    drawn = np.random.default_rng(8).standard_normal((WIDTH, WIDTH), dtype=np.float32)
    return drawn * np.float32(gain * WIDTH**-0.5)


@plant
def matmul(graph: Graph, gain: float) -> str:
    """An outlier feature: many terms of one sign."""
    graph.keep("abs_weight", np.full((WIDTH, WIDTH), 3e4 * gain))
    graph.add("Abs", "h", "positive")
    return graph.add("MatMul", "positive abs_weight", "project")


@plant
def exp(graph: Graph, gain: float) -> str:
    graph.keep("logit", 12.0 if gain == 1 else 9.0)
    graph.add("Abs", "h", "positive")
    graph.add("Max", "positive logit", "logits")
    return graph.add("Exp", "logits", "exponential")


@plant
def power(graph: Graph, gain: float) -> str:
    graph.keep("loud", 900.0 * gain), graph.keep("two", 2.0)
    graph.add("Mul", "h loud", "scaled")
    return graph.add("Pow", "scaled two", "power_of_two")


@plant
def reduce_sum(graph: Graph, gain: float) -> str:
    graph.keep("terms", np.full(4096, 60.0 * gain)), graph.keep("last", [-1], np.int64)
    graph.keep("column", [2, WIDTH, 1], np.int64)
    graph.add("Sigmoid", "h", "positive")
    graph.add("Reshape", "positive column", "columns")
    graph.add("Mul", "columns terms", "spread")
    return graph.add("ReduceSum", "spread last", "total", keepdims=0)


@plant
def norm(graph: Graph, gain: float) -> str:
    """The square in a decomposed norm; the mean of float16 squares is finite where they are."""
    graph.keep("loud", 400.0 * gain + 10), graph.keep("last", [-1], np.int64), graph.keep("eps", 1e-3)
    graph.add("Mul", "h loud", "stream")
    graph.add("Mul", "stream stream", "square")
    graph.add("ReduceMean", "square last", "mean_square")
    graph.add("Add", "mean_square eps", "variance")
    graph.add("Sqrt", "variance", "deviation")
    graph.add("Div", "stream deviation", "normed")
    return "square"


@plant
def scores(graph: Graph, gain: float) -> str:
    """Attention without a softmax: scores are multiplied by values as they are, and scaled too late."""
    graph.keep("query_weight", weight(900 * gain)), graph.keep("key_weight", weight(900))
    graph.keep("head_scale", 2.0**-8)
    graph.add("MatMul", "h query_weight", "query")
    graph.add("MatMul", "h key_weight", "key")
    graph.add("Transpose", "key", "key_turned", perm=[1, 0])
    graph.add("MatMul", "query key_turned", "scores")
    graph.add("Mul", "scores head_scale", "scaled_scores")
    graph.add("MatMul", "scaled_scores h", "attended")
    return "scores"


@plant
def gemm(graph: Graph, gain: float) -> str:
    """The factor ``alpha`` of the op, not its inputs, is large."""
    graph.keep("gemm_weight", weight(1.0)), graph.keep("gemm_bias", np.ones(WIDTH))
    return graph.add("Gemm", "h gemm_weight gemm_bias", "dense", alpha=2e5 * gain, transB=1)


@plant
def convolution(graph: Graph, gain: float) -> str:
    graph.keep("image_shape", [2, 1, 4, 4], np.int64)
    graph.keep("kernel", np.full((3, 1, 3, 3), 3e4 * gain))
    graph.add("Abs", "h", "positive")
    graph.add("Reshape", "positive image_shape", "image")
    return graph.add("Conv", "image kernel", "convolution", pads=[1, 1, 1, 1])


@plant
def cumulative_sum(graph: Graph, gain: float) -> str:
    graph.keep("steps", np.full(4096, 60.0 * gain)), graph.keep("axis", 2, np.int64)
    graph.keep("column", [2, WIDTH, 1], np.int64)
    graph.add("Sigmoid", "h", "positive")
    graph.add("Reshape", "positive column", "columns")
    graph.add("Mul", "columns steps", "increments")
    return graph.add("CumSum", "increments axis", "running_total")


@plant
def division(graph: Graph, gain: float) -> str:
    graph.keep("small", 2.0**-20 if gain == 1 else 2.0**-8)
    return graph.add("Div", "h small", "ratio")


@plant
def branch(graph: Graph, gain: float) -> str:
    """The product is in the body of an If that is taken."""
    graph.keep("boost", 3e4 * gain)
    graph.keep("zero", 0.0)
    graph.keep("both", [0, 1], np.int64)
    graph.add("ReduceMax", "h both", "largest", keepdims=0)
    graph.add("Greater", "largest zero", "positive")
    shape = (2, WIDTH)
    louder = [
        helper.make_node("Mul", ["h", "boost"], ["louder"], name="louder"),
        helper.make_node("Mul", ["louder", "four"], ["loudest"], name="loudest"),
    ]
    then = helper.make_graph(louder, "then", [], [value("loudest", shape)])
    same = helper.make_node("Identity", ["h"], ["same"], name="same")
    otherwise = helper.make_graph([same], "else", [], [value("same", shape)])
    graph.keep("four", 4.0)
    graph.add("If", "positive", "picked", then_branch=then, else_branch=otherwise)
    return "loudest"
