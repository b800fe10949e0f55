"""Small valid graphs with bodies: If, Loop and Scan that read values and initializers around them."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.support.onnx_models.case import Graph, constant, value
from tests.support.onnx_models.structure import WIDTH, Cases, Made, linear, register, row

CONTROL: Cases = {}
SHAPE = (2, WIDTH)
BOOL, INT64 = TensorProto.BOOL, TensorProto.INT64


def body(name: str, output: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [value(output, SHAPE)])


def node(op: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), output.split(), name=output.split()[0], **attributes)


def conditional(
    graph: Graph, then: onnx.GraphProto, otherwise: onnx.GraphProto, *, taken: bool = True
) -> str:
    """Add ``picked``, of a condition that is an input."""
    graph.inputs["condition"] = np.array(taken)
    return graph.add("If", "condition", "picked", then_branch=then, else_branch=otherwise)


@register(CONTROL)
def if_captures() -> Made:
    """Both branches read an outer value and a tied initializer, and use the same names inside."""
    graph = linear()
    then = body("then", "inner_y", node("MatMul", "h w", "inner"), node("Relu", "inner", "inner_y"))
    otherwise = body("else", "inner_y", node("Add", "h x", "inner"), node("Exp", "inner", "inner_y"))
    conditional(graph, then, otherwise)
    graph.add("Tanh", "picked", "y")
    return graph.model("y"), graph.inputs


@register(CONTROL)
def if_else_taken() -> Made:
    graph = linear()
    graph.keep("large", 1e5)
    then = body("then", "t", node("Mul", "h large", "t"))
    otherwise = body("else", "e", node("Identity", "h", "e"))
    conditional(graph, then, otherwise, taken=False)
    return graph.model("picked"), graph.inputs


@register(CONTROL)
def if_without_computation() -> Made:
    """Branches that hand on an initializer and an outer value."""
    graph = linear()
    graph.keep("rows", row(seed=3))
    then, otherwise = (
        body("then", "t", node("Identity", "rows", "t")),
        body("else", "e", constant("e", row())),
    )
    conditional(graph, then, otherwise)
    graph.add("Add", "picked h", "y")
    return graph.model("y"), graph.inputs


@register(CONTROL)
def if_with_own_initializer() -> Made:
    graph = linear()
    then = body("then", "t", node("Mul", "h factor", "t"))
    then.initializer.append(onnx.numpy_helper.from_array(np.float32(1e-9), "factor"))
    conditional(graph, then, body("else", "e", node("Neg", "h", "e")))
    return graph.model("picked"), graph.inputs


@register(CONTROL)
def nested_if() -> Made:
    graph = linear()
    deep = body("deep", "d", node("MatMul", "h w", "d"))
    flat = body("flat", "f", node("Sub", "h outer", "f"))
    inner = node("If", "condition", "n", then_branch=deep, else_branch=flat)
    then = body("then", "t", node("Relu", "h", "outer"), inner, node("Add", "n outer", "t"))
    conditional(graph, then, body("else", "e", node("Neg", "h", "e")))
    return graph.model("picked"), graph.inputs


@register(CONTROL)
def loop_captures() -> Made:
    """Three turns of ``state = tanh(state @ w + x)``, with all states stacked."""
    graph = linear()
    graph.keep("turns", 3, np.int64), graph.keep("yes", True, bool)
    inputs = [value("turn", (), INT64), value("go", (), BOOL), value("state", SHAPE)]
    outputs = [value("go_on", (), BOOL), value("next", SHAPE), value("seen", SHAPE)]
    nodes = [
        node("Identity", "go", "go_on"),
        node("MatMul", "state w", "product"),
        node("Add", "product x", "sum"),
        node("Tanh", "sum", "next"),
        node("Identity", "next", "seen"),
    ]
    graph.add("Loop", "turns yes h", "last all", body=helper.make_graph(nodes, "body", inputs, outputs))
    return graph.model("last all", last=SHAPE, all=(3, *SHAPE)), graph.inputs


@register(CONTROL)
def scan_captures() -> Made:
    graph = linear()
    graph.keep("start", np.zeros(WIDTH))
    inputs = [value("carried", (WIDTH,)), value("element", (WIDTH,))]
    outputs = [value("next", (WIDTH,)), value("part", (WIDTH,))]
    nodes = [
        node("MatMul", "element w", "product"),
        node("Add", "carried product", "next"),
        node("Relu", "next", "part"),
    ]
    scanned = helper.make_graph(nodes, "body", inputs, outputs)
    graph.add("Scan", "start h", "last parts", body=scanned, num_scan_inputs=1)
    return graph.model("last parts"), graph.inputs
