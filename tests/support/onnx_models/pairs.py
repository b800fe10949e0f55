"""A float32 model, a good conversion of it to float16, and conversions that are broken at one known node."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.support.onnx_models.case import Arrays, Graph

WIDTH = 16
NORM = ("square", "mean_square", "variance", "deviation")
KEPT = (*NORM, "share", "log_eps", "log")
FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16


@dataclass(frozen=True)
class Pair:
    """A float32 model with a good and a broken conversion, and the node that is wrong in the broken one."""

    original: onnx.ModelProto
    good: onnx.ModelProto
    bad: onnx.ModelProto
    inputs: Arrays
    node: str


def original() -> Graph:
    """A projection to values around 500, an RMS norm, a second projection, log(softmax(x) + 1e-8)."""
    random = np.random.default_rng(11)
    x = random.standard_normal((6, WIDTH), dtype=np.float32)
    weights = random.standard_normal((2, WIDTH, WIDTH), dtype=np.float32)
    graph = Graph({"x": x})
    graph.keep("first", weights[0] * np.float32(120)), graph.keep("second", weights[1])
    graph.keep("last", [-1], np.int64), graph.keep("eps", 1e-3), graph.keep("log_floor", 1e-8)
    graph.keep("temperature", 2.0)
    graph.add("MatMul", "x first", "up")
    graph.add("Mul", "up up", "square")
    graph.add("ReduceMean", "square last", "mean_square")
    graph.add("Add", "mean_square eps", "variance")
    graph.add("Sqrt", "variance", "deviation")
    graph.add("Div", "up deviation", "normed")
    graph.add("MatMul", "normed second", "project")
    graph.add("Mul", "project temperature", "logits")
    graph.add("Softmax", "logits", "share", axis=-1)
    graph.add("Add", "share log_floor", "log_eps")
    graph.add("Log", "log_eps", "log")
    return graph


def half(graph: Graph, outputs: str, kept: Collection[str] = ()) -> onnx.ModelProto:
    """Convert a flat graph by hand: float16 but for the kept nodes, a cast at each border of a region."""
    floats = {t.name for t in graph.initializers if t.data_type == FLOAT}
    users = {name: [n.name in kept for n in graph.nodes if name in n.input] for name in floats}
    low = {name for name, wide in users.items() if not all(wide)}
    single = (floats - low) | {name for name, array in graph.inputs.items() if array.dtype == np.float32}
    made = Graph(graph.inputs, opset=graph.opset)
    for tensor in graph.initializers:
        array = numpy_helper.to_array(tensor)
        made.keep(tensor.name, array, np.float16 if tensor.name in low else array.dtype)

    def cast(name: str, wanted: set[str], kind: int) -> str:
        if name in wanted or name not in low | single:
            return name
        target = f"{name}/{'wide' if kind == FLOAT else 'half'}"
        if not any(target in n.output for n in made.nodes):
            made.add("Cast", name, target, to=kind)
        return target

    for node in graph.nodes:
        wanted, kind = (single, FLOAT) if node.name in kept else (low, HALF)
        copied = onnx.NodeProto.FromString(node.SerializeToString())
        copied.input[:] = [cast(name, wanted, kind) for name in node.input]
        made.nodes.append(copied)
        wanted.update(node.output)
    for name in outputs.split():
        if name in low:
            for node in made.nodes:
                node.input[:] = [f"{name}/half" if n == name else n for n in node.input]
                node.output[:] = [f"{name}/half" if n == name else n for n in node.output]
            made.add("Cast", f"{name}/half", name, name=f"{name}/wide", to=FLOAT)
    return made.model(outputs)


# each breaks the float32 graph or moves the border of the kept region, and returns the wrong node's name
BROKEN: dict[str, Callable[[Graph, set[str]], str]] = {}


def broken(function: Callable[[Graph, set[str]], str]) -> Callable[[Graph, set[str]], str]:
    BROKEN[function.__name__] = function
    return function


def pair(name: str) -> Pair:
    graph, kept = original(), set(KEPT)
    node = BROKEN[name](graph, kept)
    first = original()
    return Pair(
        first.model("log"), half(first, "log", KEPT), half(graph, "log", kept), dict(graph.inputs), node
    )


def find(graph: Graph, name: str) -> onnx.NodeProto:
    (node,) = [n for n in graph.nodes if n.name == name]
    return node


def change(graph: Graph, name: str, edit: Callable[[np.ndarray], np.ndarray]) -> None:
    (tensor,) = [t for t in graph.initializers if t.name == name]
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(edit(numpy_helper.to_array(tensor))), name))


@broken
def dropped_eps(graph: Graph, kept: set[str]) -> str:
    """The addition is there, in float16, where 1e-8 is 0: the logarithm is -inf."""
    kept.remove("log_eps")
    return "log_eps"


@broken
def transposed_weight(graph: Graph, kept: set[str]) -> str:
    change(graph, "second", np.transpose)
    return "project"


@broken
def wrong_constant(graph: Graph, kept: set[str]) -> str:
    change(graph, "temperature", lambda array: array / 2)
    return "logits"


@broken
def moved_cast(graph: Graph, kept: set[str]) -> str:
    """The region begins one node late: the square overflows before the cast."""
    kept.remove("square")
    return "square"


@broken
def wrong_axis(graph: Graph, kept: set[str]) -> str:
    find(graph, "share").attribute[0].CopyFrom(helper.make_attribute("axis", 0))
    return "share"
