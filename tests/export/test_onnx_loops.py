"""Loops whose state leaves the format: the loop and its state are float32 in the written file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.onnx_conversion import converted_graph

F, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64


def value(name: str, kind: int, shape: list[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def node(op: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, output.split(), name=output.split()[0], **attributes)


def loop(ends: str, turns: int, factor: float, *, moved: bool, scans: bool, nested: bool) -> onnx.ModelProto:
    """A state that is multiplied in each turn; what comes out is divided by all of that."""
    body = [node("Mul", ["h", "factor"], "grown")]
    body += (
        [node("Reshape", ["grown", "flat"], "next")] if moved else [node("Add", ["grown", "zero"], "next")]
    )
    going = (
        node("Less", ["turn", "last"], "going") if ends == "condition" else node("Identity", ["c"], "going")
    )
    outs = [value("going", BOOL, []), value("next", F, [4])]
    if scans:
        body.append(node("Tanh", ["h"], "small"))
        outs.append(value("small", F, [4]))
    ins = [value("turn", INT64, []), value("c", BOOL, []), value("h", F, [4])]
    inner = helper.make_graph([*body, going], "inner", ins, outs)
    first = ["", "yes", "x"] if ends == "condition" else ["turns", "", "x"]
    made = ["state"] + (["seen"] if scans else [])
    nodes = [helper.make_node("Loop", first, made, name="loop", body=inner)]
    if nested:
        once = helper.make_graph(
            [
                helper.make_node("Loop", [*first[:2], "o"], made, name="loop", body=inner),
                node("Identity", ["p"], "q"),
            ],
            "outer",
            [value("t", INT64, []), value("p", BOOL, []), value("o", F, [4])],
            [value("q", BOOL, []), value("state", F, [4])],
        )
        nodes = [helper.make_node("Loop", ["one", "", "x"], ["outer_state"], name="outer", body=once)]
    nodes.append(node("Mul", ["outer_state" if nested else "state", "back"], "y"))
    stored = {
        "factor": np.float32(factor), "zero": np.float32(0), "back": np.float32(factor**-turns),
        "flat": np.array([4], np.int64), "last": np.array(turns - 2, np.int64), "yes": np.array(True),
        "one": np.array(1, np.int64),
    }  # fmt: skip
    inputs = [value("x", F, [4])]
    if ends == "input":
        inputs.append(value("turns", INT64, []))
    else:
        stored["turns"] = np.array(turns, np.int64)
    outputs = [value("y", F, [4])] + ([value("seen", F, ["n", 4])] if scans else [])
    graph = helper.make_graph(
        nodes,
        "graph",
        inputs,
        outputs,
        [numpy_helper.from_array(np.asarray(a), n) for n, a in stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    ("ends", "turns", "factor", "options"),
    [
        ("count", 20, 2.0, ""),
        ("input", 40, 1.5, ""),
        ("condition", 20, 2.0, ""),
        ("input", 30, 1.5, "scans"),
        ("input", 20, 2.0, "moved"),
        ("count", 20, 2.0, "moved scans"),
        ("input", 20, 2.0, "nested"),
        ("input", 6, 1.5, ""),
        ("condition", 8, 0.5, "scans"),
    ],
)
def test_the_written_loop_gives_what_the_original_gives(
    ends: str, turns: int, factor: float, options: str, tmp_path: Path
) -> None:
    model = loop(ends, turns, factor, **{name: name in options for name in ("moved", "scans", "nested")})
    inputs: dict[str, Any] = {"x": np.array([0.5, -1.0, 1.5, 2.0], np.float32)}
    if ends == "input":
        inputs["turns"] = np.array(turns, np.int64)
    converted_graph(model, inputs, tmp_path)
    paths = (tmp_path / "before.onnx", tmp_path / "out" / "model.onnx")
    exact, found = (onnxruntime.InferenceSession(path).run(None, inputs) for path in paths)
    for one, other in zip(exact, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=0.02)
    written = onnx.load(paths[1])
    if "nested" in options:
        return
    (kept,) = [each for each in written.graph.node if each.op_type == "Loop"]
    state = kept.attribute[0].g.input[2].type.tensor_type.elem_type
    most = 8 * turns if ends == "input" else turns  # a given number of turns may be larger
    assert state == (F if 2 * factor**most > 65504 else TensorProto.FLOAT16)
