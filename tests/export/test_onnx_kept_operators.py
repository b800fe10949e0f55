"""Operators without a 16-bit kernel, or of a runtime: they stay in float32, and the rest is converted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.support.onnx_conversion import converted_graph
from tests.support.onnx_typed import RANDOM, Arrays, F, floats, graph, node, ran


def suppression() -> tuple[onnx.ModelProto, Arrays]:
    corners = RANDOM.uniform(0, 1, (1, 40, 2)).astype(np.float32)
    boxes = np.concatenate([corners, corners + 0.3], -1)
    nodes = [
        node("MatMul", "features weights", "logits"),
        node("Sigmoid", "logits", "scores"),
        node("NonMaxSuppression", "boxes scores most overlap", "chosen"),
    ]
    # scores that float16 tells apart, also those of other rows
    stored = {
        "weights": np.stack([RANDOM.permutation(40) - 20 for _ in range(16)]).astype(np.float32) / 16,
        "most": np.array([9], np.int64),
        "overlap": np.array([0.5], np.float32),
    }
    output = helper.make_tensor_value_info("chosen", TensorProto.INT64, ["n", 3])
    return graph(nodes, {"features": np.eye(2, 16, dtype=np.float32)[None], "boxes": boxes}, [output], stored)


def regions() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("Conv", "x w", "c", pads=[1, 1, 1, 1]),
        node("RoiAlign", "c rois of", "r", output_height=2, output_width=2),
        node("Relu", "r", "y"),
    ]
    rois = np.array([[0, 0, 4, 4], [2, 2, 7, 7]], np.float32)
    given = {"x": floats(1, 3, 8, 8), "rois": rois, "of": np.zeros(2, np.int64)}
    return graph(nodes, given, [4], {"w": floats(4, 3, 3, 3)})


def scaler() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("Scaler", "x", "s", "ai.onnx.ml", offset=[0.5] * 8, scale=[2.0] * 8),
        node("Gemm", "s w", "g"),
        node("Relu", "g", "y"),
    ]
    return graph(nodes, {"x": floats(4, 8)}, [2], {"w": floats(8, 6)}, ai_onnx_ml=3)


def norm_in_the_standard_domain() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [
        node("SimplifiedLayerNormalization", "x scale", "n", epsilon=1e-5),
        node("MatMul", "n w", "m"),
        node("SimplifiedLayerNormalization", "m scale", "y", epsilon=1e-5),
    ]
    return graph(nodes, {"x": floats(2, 5, 16)}, [3], {"w": floats(16, 16), "scale": floats(16)})


def sequence() -> tuple[onnx.ModelProto, Arrays]:
    nodes = [node("MatMul", "x w", "m"), node("SplitToSequence", "m", "parts", axis=0)]
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(F, None))
    return graph(nodes, {"x": floats(3, 8)}, [helper.make_value_info("parts", kind)], {"w": floats(8, 8)})


GRAPHS: dict[str, tuple[Callable[[], tuple[onnx.ModelProto, Arrays]], str]] = {
    "NonMaxSuppression": (suppression, "MatMul"),
    "RoiAlign": (regions, "Conv"),
    "Scaler": (scaler, "Gemm"),
    "SimplifiedLayerNormalization": (norm_in_the_standard_domain, "MatMul"),
    "SplitToSequence": (sequence, "MatMul"),
}


@pytest.mark.parametrize("operator", GRAPHS)
def test_it_stays_in_float32_and_its_neighbours_are_converted(operator: str, tmp_path: Path) -> None:
    make, neighbour = GRAPHS[operator]
    model, inputs = make()
    before, after = tmp_path / "before.onnx", tmp_path / "out" / "model.onnx"
    converted_graph(model, inputs, tmp_path)
    for exact, found in zip(ran(before, inputs), ran(after, inputs), strict=True):
        if exact.dtype.kind == "i":
            np.testing.assert_array_equal(found, exact)
        else:
            np.testing.assert_allclose(found, exact, atol=0.01 * float(np.abs(exact).max()))
    written = onnx.load(after)
    known = {v.name: v.type.tensor_type.elem_type for v in (*written.graph.value_info, *written.graph.output)}
    known |= {t.name: t.data_type for t in written.graph.initializer}
    (kept, *_) = [each for each in written.graph.node if each.op_type == operator]
    (beside, *_) = [each for each in written.graph.node if each.op_type == neighbour]
    assert known[beside.output[0]] == TensorProto.FLOAT16
    assert TensorProto.FLOAT16 not in {known.get(name) for name in (*kept.input, *kept.output)}
    assert kept.domain == next(each.domain for each in model.graph.node if each.op_type == operator)
