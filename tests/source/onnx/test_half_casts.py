"""Under a policy that stores weights in 16 bits, casts of a graph to float32 follow, as converters do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnxruntime.transformers.float16 import convert_float_to_float16

import ampaudit
from ampaudit.core.source_config import SourceConfig
from tests.support.onnx_strict import run_fp32, run_strict


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


@pytest.mark.parametrize("stored", [True, False], ids=["initializer", "constant"])
def test_a_number_of_a_graph_is_stored_in_16_bits(stored: bool, tmp_path: Path) -> None:
    """Zero times -1e9 is zero in PyTorch, where Python holds the number, but that of a graph is -inf."""
    number = onnx.numpy_helper.from_array(np.array(-1e9, np.float32), "low")
    nodes = [] if stored else [helper.make_node("Constant", [], ["low"], value=number)]
    nodes += [helper.make_node("Mul", ["x", "low"], ["mask"]), helper.make_node("Softmax", ["mask"], ["y"])]
    places = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "masked", places[:1], places[1:], [number] if stored else [])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    inputs = {"x": np.array([[0, 0, 1, 1]], np.float32)}
    np.savez(tmp_path / "inputs.npz", **inputs)
    assert np.isnan(run_strict(path, inputs, assume=TensorProto.FLOAT16)["y"]).all()
    report = ampaudit.scan(str(path), policy="half", source=SourceConfig(inputs=tmp_path / "inputs.npz"))
    assert [finding.code for finding in report.findings if finding.severity == "error"] == ["AMP401"]


def test_a_mask_that_a_converter_clips_breaks_nothing(tmp_path: Path) -> None:
    lowest = onnx.numpy_helper.from_array(np.array(np.finfo(np.float32).min), "lowest")
    nodes = [
        helper.make_node("Where", ["keep", "x", "lowest"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["y"]),
    ]
    places = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in ("x", "y")]
    places.append(helper.make_tensor_value_info("keep", TensorProto.BOOL, [2, 4]))
    graph = helper.make_graph(nodes, "masked", [places[0], places[2]], [places[1]], [lowest])
    path, after = tmp_path / "model.onnx", tmp_path / "after.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    inputs = {"x": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4), "keep": np.eye(2, 4) == 0}
    np.savez(tmp_path / "inputs.npz", **inputs)
    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), after)
    np.testing.assert_allclose(run_strict(after, inputs)["y"], run_fp32(path, inputs)["y"], atol=1e-3)
    report = ampaudit.scan(str(path), policy="onnx", source=SourceConfig(inputs=tmp_path / "inputs.npz"))
    (finding,) = (finding for finding in report.findings if finding.code == "AMP401")
    assert finding.severity == "note"
    assert "the policy clips it" in finding.cause
