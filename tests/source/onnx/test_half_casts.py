"""Under a policy that stores weights in 16 bits, casts of a graph to float32 follow, as converters do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

import ampaudit
from ampaudit.core.source_config import SourceConfig


def masked(path: Path, weight: np.dtype[np.floating]) -> None:
    """Scores times a weight, weighted by a mask that is cast from integers."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(weight))
    nodes = [
        helper.make_node("Cast", ["mask"], ["kept"], name="to_float", to=kind),
        helper.make_node("MatMul", ["kept", "w"], ["y"], name="product"),
        helper.make_node("Cast", ["y"], ["wide"], name="widen", to=TensorProto.FLOAT),
    ]
    inputs = [helper.make_tensor_value_info("mask", TensorProto.INT64, [2, 4])]
    outputs = [helper.make_tensor_value_info("wide", TensorProto.FLOAT, [2, 4])]
    values = onnx.numpy_helper.from_array(np.linspace(-1, 1, 16, dtype=weight).reshape(4, 4), "w")
    graph = helper.make_graph(nodes, "masked", inputs, outputs, [values])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    np.savez(path.with_name("inputs.npz"), mask=np.ones((2, 4), np.int64))


def test_half_runs_where_a_mask_is_cast(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    masked(path, np.dtype(np.float32))
    source = SourceConfig(inputs=tmp_path / "inputs.npz")
    report = ampaudit.scan(str(path), policy="half", source=source)
    assert report.exit_code == 0
    assert {s.precision for s in report.sites if s.layer in ("to_float", "product")} == {"float16"}


def test_a_graph_with_16_bit_weights_keeps_its_casts(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    masked(path, np.dtype(np.float16))
    report = ampaudit.scan(str(path), source=SourceConfig(inputs=tmp_path / "inputs.npz"))
    assert report.run.policy == "as-is"
    (widened,) = (s.precision for s in report.sites if s.layer == "widen")
    assert widened == "float32"
