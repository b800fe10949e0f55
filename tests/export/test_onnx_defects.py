"""Graphs that a conversion once broke, refused or misjudged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from ampaudit.core.errors import RunFailed
from ampaudit.export.onnx.types import SlotType, node_types
from tests.support.onnx_conversion import check_structure, close, converted, converted_graph, types
from tests.support.onnx_models.case import Graph
from tests.support.onnx_models.structure import linear, row
from tests.support.onnx_strict import run_fp32, run_strict
from tests.support.onnx_typed import floats, graph, node


def check(graph: Graph, outputs: str, folder: Path, **options: str) -> onnx.ModelProto:
    """Convert a graph, and return the file, which must be right when every 16-bit value is rounded."""
    path = folder / "model.onnx"
    onnx.save(graph.model(outputs), path)
    converted(path, graph.inputs, folder / "out", **options)
    after = folder / "out" / "model.onnx"
    check_structure(path, after)
    close(run_fp32(path, graph.inputs), run_strict(after, graph.inputs))
    return onnx.load(after)


def test_cast_like_follows_its_target(tmp_path: Path) -> None:
    """The type of its result is its second input's, whatever reads it."""
    graph = linear(ids=np.ones((2, 4), np.int64))
    graph.keep("large", 1e6)
    graph.add("Mul", "h large", "wide")
    graph.add("CastLike", "ids wide", "numbers")
    graph.add("Tanh", "numbers", "t")
    graph.add("Add", "h t", "s")
    graph.add("Div", "wide large", "back")
    check(graph, "s back", tmp_path)


def test_a_mask_that_stays_in_float32_is_as_it_was(tmp_path: Path) -> None:
    """Where float32 holds the number of a ``value_float``, it is not clamped."""
    graph = linear()
    graph.add("Constant", "", "lowest", value_float=-1e9)
    graph.nodes[-1].input[:] = []
    graph.keep("large", 1e6), graph.keep("keep", [[True, True, True, False]] * 2, bool)
    graph.add("Mul", "h large", "wide")
    graph.add("Where", "keep wide lowest", "masked")
    graph.add("Softmax", "masked", "y", axis=-1)
    check(graph, "y", tmp_path)


def test_an_optional_keeps_its_type(tmp_path: Path) -> None:
    graph = linear()
    graph.add("Optional", "h", "perhaps")
    graph.add("OptionalGetElement", "perhaps", "value")
    graph.add("Tanh", "value", "t")
    check(graph, "t", tmp_path)


def test_one_tensor_under_several_output_names(tmp_path: Path) -> None:
    graph = linear()
    graph.add("Identity", "h", "same")
    graph.add("Tanh", "same", "t")
    graph.add("Relu", "t", "y")
    graph.add("Identity", "y", "z")
    check(graph, "h y same z", tmp_path)


def test_an_input_times_a_large_number_is_no_mask(tmp_path: Path) -> None:
    """No parameter touches it, but what is made of it is data, beyond the format through a whole norm."""
    graph = Graph({"x": row()})
    graph.keep("large", 1e6), graph.keep("axes", [-1], np.int64), graph.keep("eps", 1e-5)
    graph.add("Mul", "x large", "wide")
    graph.add("Relu", "wide", "positive")
    graph.add("Mean", "positive x", "both")
    graph.add("ReduceMean", "both axes", "mean")
    graph.add("Sub", "both mean", "centered")
    graph.add("Mul", "centered centered", "squares")
    graph.add("ReduceMean", "squares axes", "variance")
    graph.add("Add", "variance eps", "padded")
    graph.add("Sqrt", "padded", "deviation")
    graph.add("Div", "centered deviation", "norm")
    graph.add("Tanh", "norm", "y")
    model = check(graph, "y", tmp_path)
    assert types(model)["centered"] == TensorProto.FLOAT


@pytest.mark.parametrize("operator", ["Reciprocal", "Div"])
def test_what_makes_a_vanishing_divisor_stays_in_float32(operator: str, tmp_path: Path) -> None:
    graph = Graph({"x": row()})
    graph.keep("zero", 0.0), graph.keep("eps", 1e-16), graph.keep("one", 1.0)
    graph.add("Mul", "x zero", "nothing")
    graph.add("Add", "nothing eps", "padded")
    graph.add("Sqrt", "padded", "tiny")
    if operator == "Div":
        graph.add("Div", "one tiny", "inverse")
    else:
        graph.add("Reciprocal", "tiny", "inverse")
    graph.add("Mul", "inverse tiny", "y")
    check(graph, "y", tmp_path)


def test_filled_tensors_in_bfloat16(tmp_path: Path) -> None:
    graph = linear()
    graph.opset = 21
    graph.add("Shape", "h", "shape")
    value = helper.make_tensor("value", TensorProto.FLOAT, [1], [0.5])
    graph.add("ConstantOfShape", "shape", "filled", value=value)
    graph.add("Max", "h filled", "y")
    model = check(graph, "y", tmp_path, dtype="bfloat16")
    assert types(model)["filled"] == TensorProto.BFLOAT16


@pytest.mark.parametrize("number", [1e6, 1e-9])
def test_a_filled_tensor_that_the_format_lacks_stays_in_float32(number: float, tmp_path: Path) -> None:
    graph = linear()
    graph.keep("zero", 0.0)
    graph.add("Shape", "h", "shape")
    value = helper.make_tensor("value", TensorProto.FLOAT, [1], [number])
    graph.add("ConstantOfShape", "shape", "filled", value=value)
    graph.add("Mul", "h zero", "nothing")
    graph.add("Add", "nothing filled", "some")
    graph.add("Div", "some filled", "y")
    check(graph, "y", tmp_path)


@pytest.mark.parametrize("opset", [11, 12, 13, 15])
def test_bfloat16_where_operators_of_old_sets_lack_it(opset: int, tmp_path: Path) -> None:
    """Neither Cast before version 13 nor If before version 16 takes it."""
    graph = linear(condition=np.array(True))
    graph.opset = opset
    then, otherwise = (
        helper.make_graph(
            [helper.make_node(operator, ["h"], [name], name=name)],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, 4))],
        )
        for operator, name in (("Neg", "then"), ("Abs", "else"))
    )
    graph.add("If", "condition", "picked", then_branch=then, else_branch=otherwise)
    graph.add("Relu", "picked", "positive")
    graph.add("Add", "positive h", "y")
    check(graph, "y", tmp_path, dtype="bfloat16")


@pytest.mark.parametrize("opset", [11, 12])
def test_the_operator_set_is_raised_for_bfloat16(opset: int, tmp_path: Path) -> None:
    """Attributes that became inputs are moved; names stay."""
    graph = linear()
    graph.opset = opset
    graph.add("Softmax", "h", "p", axis=-1)
    graph.add("ReduceSum", "p", "total", axes=[1], keepdims=1)
    graph.add("Unsqueeze", "total", "deep", axes=[0])
    graph.add("Squeeze", "deep", "flat", axes=[0])
    graph.add("Split", "h", "left right", axis=1, split=[1, 3])
    graph.add("Mul", "right flat", "y")
    model = check(graph, "y left", tmp_path, dtype="bfloat16")
    assert model.opset_import[0].version == 13
    assert types(model)["h"] == TensorProto.BFLOAT16
    assert {"p", "total", "deep", "flat", "left", "y"} <= {node.name for node in model.graph.node}


def test_the_operator_set_stays_where_a_node_would_change(tmp_path: Path) -> None:
    """Softmax over all axes from the first becomes one over that axis in version 13."""
    graph = linear()
    graph.opset = 12
    graph.add("Softmax", "h", "y", axis=0)
    model = check(graph, "y", tmp_path, dtype="bfloat16")
    assert model.opset_import[0].version == 12


def test_an_output_beyond_the_format_is_named_with_its_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the audit is kept
    graph = linear()
    graph.keep("large", 1e6)
    graph.add("Mul", "h large", "y")
    with pytest.raises(RunFailed, match="computes y as inf or NaN") as caught:
        check(graph, "y", tmp_path, io="float16")
    assert "--io float32" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("version", "output"), [(12, SlotType.FLOAT32), (13, SlotType.CHOSEN)])
def test_cast_knows_bfloat16_since_operator_set_13(version: int, output: SlotType) -> None:
    node = ir.Node("", "Cast", [ir.Value(name="x")])
    assert node_types(node, version, "bfloat16").outputs == (output,)
    assert node_types(node, version, "float16").outputs == (SlotType.CHOSEN,)


@pytest.mark.parametrize("version", [11, 13, 19])
def test_a_region_to_resize_stays_in_float32(version: int) -> None:
    """Rounding its borders to 16 bits would move pixels across them."""
    node = ir.Node("", "Resize", [ir.Value(name=name) for name in ("x", "roi", "scales")])
    for value in node.inputs:
        value.type = ir.TensorType(ir.DataType.FLOAT)
    assert node_types(node, version, "float16").inputs == (
        SlotType.CHOSEN, SlotType.FLOAT32, SlotType.FLOAT32,
    )  # fmt: skip


def test_large_weights_of_eight_bits_stay_as_they_are(tmp_path: Path) -> None:
    """They are read from the old file when the new one is written."""
    bits = np.arange(128 * 64, dtype=np.uint8) % 100
    weight = TensorProto(
        name="w", data_type=TensorProto.FLOAT8E4M3FN, dims=[128, 64], raw_data=bits.tobytes()
    )
    model, inputs = graph(
        [node("DequantizeLinear", "w scale", "wide"), node("MatMul", "x wide", "y")],
        {"x": floats(2, 128)},
        [2],
        {"scale": np.array(0.1, np.float32)},
    )
    model.graph.initializer.append(weight)
    model.opset_import[0].version, model.ir_version = 19, 9
    converted_graph(model, inputs, tmp_path)
    after = onnx.load(tmp_path / "out" / "model.onnx")
    (kept,) = (tensor for tensor in after.graph.initializer if tensor.name == "w")
    assert (kept.data_type, kept.raw_data) == (weight.data_type, weight.raw_data)


def test_a_file_in_float16_that_overflows_is_not_called_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nodes stay in float16; ONNX Runtime hides the overflow in float32 between them."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the audit is kept
    nodes = [
        node("Cast", "x", "low", to=TensorProto.FLOAT16),
        node("MatMul", "low w", "h"),
        node("Mul", "h h", "square"),
        node("ReduceMean", "square", "mean", axes=[-1]),
        node("Div", "square mean", "share"),
        node("Cast", "share", "y", to=TensorProto.FLOAT),
    ]
    made, inputs = graph(nodes, {"x": floats(4, 8)}, [2], {"w": (500 * floats(8, 8)).astype(np.float16)})
    with pytest.raises(RunFailed, match=r"computes y as inf or NaN") as refused:
        converted_graph(made, inputs, tmp_path)
    assert "convert the float32 model" in str(refused.value.hint)
    assert np.isnan(run_strict(tmp_path / "before.onnx", inputs)["y"]).any()
    assert not (tmp_path / "out").exists()


def test_an_operator_of_shapes_is_not_listed_in_float32(tmp_path: Path) -> None:
    """It reads no numbers, whatever the type of the tensor is."""
    sizes = helper.make_tensor_value_info("sizes", TensorProto.INT64, [2])
    nodes = [node("Shape", "x", "sizes"), node("MatMul", "x w", "y")]
    made, inputs = graph(nodes, {"x": floats(4, 8)}, [sizes, 2], {"w": floats(8, 8)}, {"x": ["n", 8]})
    assert not [note for note in converted_graph(made, inputs, tmp_path).notes if "float32" in note]
