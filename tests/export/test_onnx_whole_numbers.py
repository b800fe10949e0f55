"""Graphs that compute with integers as floats: right on longer inputs than those of the audit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper

from ampaudit.core.formats import FLOAT16
from ampaudit.export.onnx.whole_numbers import whole_number_nodes
from tests.support.onnx_conversion import converted_graph
from tests.support.onnx_strict import run_strict
from tests.support.onnx_typed import Arrays, floats, graph, node, ran

INTEGER, FLOAT = TensorProto.INT64, TensorProto.FLOAT
Made = tuple[onnx.ModelProto, Arrays]
POSITIONS = (
    node("Shape", "x", "shape"),
    node("Gather", "shape one", "n"),
    node("Range", "zero n one", "steps"),
    node("Cast", "steps", "positions", to=FLOAT),
)
NUMBERS = {"zero": np.array(0, np.int64), "one": np.array(1, np.int64)}


def integers(name: str, *sizes: str | int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, INTEGER, sizes)


def rotary(length: int) -> Made:
    nodes = [
        *POSITIONS,
        node("Unsqueeze", "positions one_axis", "column"),
        node("MatMul", "column frequencies", "angles"),
        node("Sin", "angles", "sine"),
        node("Cos", "angles", "cosine"),
        node("Concat", "sine cosine", "waves", axis=-1),
        node("Mul", "x waves", "turned"),
        node("MatMul", "turned w", "y"),
    ]
    frequencies = (10000.0 ** -(np.arange(4) / 4)).astype(np.float32)[None]
    stored = {**NUMBERS, "frequencies": frequencies, "one_axis": np.array([1]), "w": floats(8, 8)}
    return graph(nodes, {"x": floats(1, length, 8)}, [3], stored, {"x": [1, "n", 8]})


def division_of_indices(length: int) -> Made:
    nodes = [
        node("Cast", "i", "f", to=FLOAT),
        node("Div", "f c", "d"),
        node("Floor", "d", "whole"),
        node("Cast", "whole", "q", to=INTEGER),
        node("Gather", "table q", "e"),
        node("MatMul", "e w", "y"),
    ]
    given = {"i": np.linspace(0, 91 * 299 * min(1, length / 5000), length).astype(np.int64) // 91 * 91}
    stored = {"c": np.array(91, np.float32), "table": floats(300, 8), "w": floats(8, 4)}
    return graph(nodes, given, [2], stored, {"i": ["n"]})


def mean_by_shape(length: int) -> Made:
    nodes = [
        *POSITIONS[:2],
        node("Cast", "n", "count", to=FLOAT),
        node("MatMul", "x w", "h"),
        node("ReduceMax", "h", "most", axes=[1], keepdims=0),
        node("Div", "most count", "share"),
        node("Mul", "share large", "y"),
    ]
    stored = {**NUMBERS, "w": floats(4, 4), "large": np.array(9000, np.float32)}
    return graph(nodes, {"x": floats(1, length, 4)}, [2], stored, {"x": [1, "n", 4]})


def boxes_by_class(length: int) -> Made:
    nodes = [
        node("MatMul", "x w", "h"),
        node("Sigmoid", "h", "scores"),
        node("Cast", "labels", "class", to=FLOAT),
        node("Mul", "class width", "offset"),
        node("Add", "boxes offset", "apart"),
        node("NonMaxSuppression", "apart scores most overlap", "chosen"),
    ]
    corners = np.random.default_rng(1).uniform(0, 30, (1, 40, 2)).astype(np.float32)
    given = {
        "x": np.ones((1, 1, 16), np.float32),
        "boxes": np.concatenate([corners, corners + 20], -1),
        "labels": np.arange(40)[None, :, None] // 8 * (length // 1000),  # all the same where it is short
    }
    stored = {
        "w": np.tile(np.linspace(-0.25, 0.25, 40, dtype=np.float32), (16, 1)),
        "width": np.array(7680, np.float32),
        "most": np.array([40]),
        "overlap": np.array([0.4], np.float32),
    }
    return graph(nodes, given, [integers("chosen", "n", 3)], stored)


def phases(length: int) -> Made:
    nodes = [
        node("Div", "pitch rate", "turns"),
        node("CumSum", "turns one", "phase"),
        node("Mul", "phase circle", "angle"),
        node("Sin", "angle", "wave"),
        node("MatMul", "wave w", "y"),
    ]
    pitch = np.random.default_rng(2).uniform(80, 400, (1, length, 1)).astype(np.float32)
    rate, circle = np.array(16000, np.float32), np.array(2 * np.pi, np.float32)
    stored = {"one": NUMBERS["one"], "w": floats(1, 4), "rate": rate, "circle": circle}
    return graph(nodes, {"pitch": pitch}, [3], stored, {"pitch": [1, "n", 1]})


def peaks_of_a_picture(length: int) -> Made:
    nodes = [
        node("TopK", "x k", "values places"),
        node("Cast", "places", "floats", to=FLOAT),
        node("Div", "floats width", "row"),
        node("Floor", "row", "rows"),
        node("Cast", "rows", "y", to=INTEGER),
    ]
    stored = {"k": np.array([8]), "width": np.array(97, np.float32)}
    x = np.zeros((1, length), np.float32)
    x[0, np.linspace(0, length - 1, 8).astype(int)] = range(1, 9)
    return graph(nodes, {"x": x}, [integers("y", 1, "k")], stored, {"x": [1, "n"]})


def lengths(length: int) -> Made:
    nodes = [
        *POSITIONS,
        node("Cast", "valid", "most", to=FLOAT),
        node("Less", "positions most", "mask"),
        node("Where", "mask x nothing", "kept"),
        node("Mul", "kept w", "y"),
    ]
    given = {"x": floats(4, length), "valid": np.array([length - 5])}
    stored = {**NUMBERS, "w": floats(1, 1), "nothing": np.array(0, np.float32)}
    return graph(nodes, given, [2], stored, {"x": [4, "n"]})


def window(length: int) -> Made:
    """Keep what is less than seven places away from the last one."""
    nodes = [
        *POSITIONS,
        node("Cast", "n", "end", to=FLOAT),
        node("Sub", "end positions", "away"),
        node("Less", "away seven", "near"),
        node("Where", "near x nothing", "kept"),
        node("Mul", "kept w", "y"),
    ]
    stored = {**NUMBERS, "w": floats(1, 1), "seven": np.array(7, np.float32)}
    stored["nothing"] = np.array(0, np.float32)
    return graph(nodes, {"x": floats(4, length)}, [2], stored, {"x": [4, "n"]})


def computed_frequencies(length: int) -> Made:
    """Times t exp(-k Range), as in diffusion models, with a Gemm."""
    nodes = [
        node("Range", "zero four one", "steps"),
        node("Cast", "steps", "orders", to=FLOAT),
        node("Mul", "orders falling", "powers"),
        node("Exp", "powers", "row"),
        node("Unsqueeze", "row zero_axis", "frequencies"),
        node("Cast", "times", "column", to=FLOAT),
        node("Gemm", "column frequencies bias", "angles"),
        node("Sin", "angles", "waves"),
        node("MatMul", "waves w", "y"),
    ]
    stored = {
        **NUMBERS,
        "four": np.array(4),
        "falling": np.array(-2.3, np.float32),
        "zero_axis": np.array([0]),
        "bias": np.zeros(4, np.float32),
        "w": floats(4, 4),
    }
    times = np.linspace(0, min(length, 5000) / 100, 20).astype(np.int64)[:, None] * (1 + length // 1000)
    return graph(nodes, {"times": times}, [2], stored, {"times": ["n", 1]})


def table_of_positions(length: int) -> Made:
    nodes = [
        *POSITIONS[:2],
        node("Reshape", "n one_element", "end"),
        node("Slice", "table zeros end", "positions"),
        node("Mul", "positions slow", "angles"),
        node("Sin", "angles", "waves"),
        node("Mul", "x waves", "y"),
    ]
    stored = {
        **NUMBERS,
        "one_element": np.array([1]),
        "zeros": np.array([0]),
        "table": np.arange(16384, dtype=np.float32),
        "slow": np.array(0.9, np.float32),
    }
    length = min(length, 16384)
    return graph(nodes, {"x": floats(1, length)}, [2], stored, {"x": [1, "n"]})


def fractions(length: int) -> Made:
    """Interpolate between neighbors: a position minus its floor."""
    nodes = [
        *POSITIONS,
        node("Mul", "positions step", "places"),
        node("Floor", "places", "left"),
        node("Sub", "places left", "share"),
        node("Mul", "x share", "y"),
    ]
    stored = {**NUMBERS, "step": np.array(0.37, np.float32)}
    return graph(nodes, {"x": floats(1, length)}, [2], stored, {"x": [1, "n"]})


def mean_by_mask(length: int) -> Made:
    nodes = [
        node("Cast", "mask", "ones", to=FLOAT),
        node("ReduceSum", "ones one_axis", "count", keepdims=1),
        node("ReduceMax", "x", "most", axes=[1], keepdims=1),
        node("Div", "most count", "share"),
        node("Mul", "share large", "y"),
    ]
    given = {"x": floats(1, length), "mask": np.ones((1, length), np.int64)}
    stored = {"one_axis": np.array([1]), "large": np.array(9000, np.float32)}
    return graph(nodes, given, [2], stored, {"x": [1, "n"], "mask": [1, "n"]})


GRAPHS: dict[str, Callable[[int], Made]] = {
    made.__name__: made
    for made in (
        rotary,
        division_of_indices,
        mean_by_shape,
        boxes_by_class,
        phases,
        peaks_of_a_picture,
        lengths,
        window,
        computed_frequencies,
        table_of_positions,
        fractions,
        mean_by_mask,
    )
}


def converted(model: onnx.ModelProto, inputs: Arrays, folder: Path) -> tuple[Path, Path]:
    converted_graph(model, inputs, folder)
    return folder / "before.onnx", folder / "out" / "model.onnx"


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_converted_with_short_inputs_is_right_on_long_ones(name: str, tmp_path: Path) -> None:
    before, after = converted(*GRAPHS[name](100), tmp_path)
    for length in (8, 100, 5000, 70_001):
        _, inputs = GRAPHS[name](length)
        for exact, found in zip(ran(before, inputs), run_strict(after, inputs).values(), strict=True):
            if exact.dtype.kind == "i":
                np.testing.assert_array_equal(found, exact, err_msg=str(length))
            else:
                limit = 0.01 * float(np.abs(exact).max())
                np.testing.assert_allclose(found, exact, atol=limit, err_msg=str(length))


def test_a_mask_is_not_kept_in_float32(tmp_path: Path) -> None:
    nodes = [
        node("Cast", "mask", "ones", to=FLOAT),
        node("Sub", "one ones", "zeros"),
        node("MatMul", "x w", "scores"),
        node("Mul", "zeros low", "bias"),
        node("Add", "scores bias", "masked"),
        node("Softmax", "masked", "y", axis=-1),
    ]
    stored = {"w": floats(8, 8), "one": np.array(1, np.float32), "low": np.array(-1e4, np.float32)}
    given: dict[str, Any] = {"x": floats(4, 8), "mask": np.ones((4, 8), np.int64)}
    _, after = converted(*graph(nodes, given, [2], stored, {"mask": ["a", "b"], "x": ["a", 8]}), tmp_path)
    written = onnx.load(after).graph
    assert sum(each.op_type == "Cast" for each in written.node) == 3  # of both inputs, and the output
    assert {v.type.tensor_type.elem_type for v in written.value_info if v.name == "masked"} == {
        TensorProto.FLOAT16
    }


@pytest.mark.parametrize(
    ("image", "first"),
    [
        (np.arange(192, dtype=np.uint8).reshape(1, 3, 8, 8), node("Cast", "image", "numbers", to=FLOAT)),
        (floats(1, 3, 8, 8), node("QuantizeLinear", "image step", "levels")),
    ],
    ids=["bytes", "quantized"],
)
def test_a_convolution_of_bytes_is_not_kept_in_float32(
    image: Any, first: onnx.NodeProto, tmp_path: Path
) -> None:
    nodes = [
        first,
        *([node("DequantizeLinear", "levels step", "numbers")] if first.op_type != "Cast" else []),
        node("Mul", "numbers step", "scaled"),
        node("Conv", "scaled w", "hidden"),
        node("Relu", "hidden", "y"),
    ]
    stored = {"step": np.array(1 / 64, np.float32), "w": floats(4, 3, 3, 3)}
    before, after = converted(
        *graph(nodes, {"image": image}, [4], stored, {"image": ["n", 3, 8, 8]}), tmp_path
    )
    weights = {tensor.name: tensor.data_type for tensor in onnx.load(after).graph.initializer}
    assert weights["w"] == TensorProto.FLOAT16
    (exact,), (found,) = ran(before, {"image": image}), run_strict(after, {"image": image}).values()
    np.testing.assert_allclose(found, exact, atol=0.01 * float(np.abs(exact).max()))


def test_a_table_times_a_mask_is_not_kept_in_float32(tmp_path: Path) -> None:
    nodes = [
        node("Gather", "table ids", "rows"),
        node("Cast", "mask", "ones", to=FLOAT),
        node("Mul", "rows ones", "masked"),
        node("MatMul", "masked w", "hidden"),
        node("ArgMax", "hidden", "y", axis=-1),
    ]
    given: dict[str, Any] = {"ids": np.arange(8), "mask": np.ones((8, 1), np.int64)}
    stored = {"table": floats(64, 4), "w": floats(4, 4)}
    sizes: dict[str, list[int | str]] = {"ids": ["n"], "mask": ["n", 1]}
    _, after = converted(*graph(nodes, given, [integers("y", "n", 1)], stored, sizes), tmp_path)
    assert {tensor.data_type for tensor in onnx.load(after).graph.initializer} == {TensorProto.FLOAT16}


def test_sums_of_sums_before_a_phase_are_followed_once() -> None:
    """Each value is read by two: every way through them would be 2^40 ways."""
    sums = [node("Add", f"h{step + 1} h{step}", f"h{step + 2}") for step in range(60)]
    nodes = [node("Identity", "x", "h0"), node("Neg", "x", "h1"), *sums]
    nodes += [node("CumSum", "h61 one", "phase"), node("Sin", "phase", "y")]
    made, _ = graph(nodes, {"x": floats(1, 8)}, [2], {"one": NUMBERS["one"]}, {"x": [1, "n"]})
    model = ir.serde.deserialize_model(onnx.shape_inference.infer_shapes(made))
    found = whole_number_nodes(model, FLOAT16, _tensor_of)
    assert {each.op_type for each in found} == {"Identity", "Neg", "Add", "CumSum", "Sin"}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_stored_number_is_the_same_in_a_constant_node(name: str) -> None:
    made, _ = GRAPHS[name](100)
    nodes = onnx.ModelProto()
    nodes.CopyFrom(made)
    del nodes.graph.initializer[:]
    for place, tensor in enumerate(made.graph.initializer):
        constant = helper.make_node("Constant", [], [tensor.name], value=tensor)
        nodes.graph.node.insert(place, constant)
    found = [
        {each.outputs[0].name for each in whole_number_nodes(model, FLOAT16, _tensor_of)}
        for model in map(ir.serde.deserialize_model, map(onnx.shape_inference.infer_shapes, (made, nodes)))
    ]
    assert found[0] == found[1]


def _tensor_of(tensor: ir.TensorProtocol) -> torch.Tensor:
    return torch.from_numpy(tensor.numpy().copy())
