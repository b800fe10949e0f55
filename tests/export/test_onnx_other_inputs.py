"""A converted file is run on inputs that nobody gave, and what breaks there is computed in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.support.onnx_conversion import converted_graph
from tests.support.onnx_strict import run_strict
from tests.support.onnx_typed import Arrays, floats, graph, node, ran

LONGER = {"x": np.full((1, 49), 2000.0, np.float32)}


def summing(level: float, sizes: list[int | str]) -> tuple[onnx.ModelProto, Arrays]:
    """Add up a series; of 16 values of 2,000 the sum is within float16, of 49 it is not."""
    nodes = [node("ReduceSum", "x one", "s", keepdims=0), node("Div", "s large", "y")]
    stored = {"one": np.array([1]), "large": np.array(100, np.float32)}
    x = np.full((1, 16), level, np.float32)
    return graph(nodes, {"x": x}, [1], stored, {"x": sizes})


def notes(model: onnx.ModelProto, inputs: Arrays, folder: Path, **options: str) -> tuple[str, ...]:
    return converted_graph(model, inputs, folder, **options).notes


def check_right(folder: Path, inputs: Arrays, decibels: float = 40.0) -> None:
    """Oracle: ONNX Runtime with the original, and a run of the file that rounds every 16-bit value."""
    found = run_strict(folder / "out" / "model.onnx", inputs)
    for ours, exact in zip(found.values(), ran(folder / "before.onnx", inputs), strict=True):
        noise = np.square(ours.astype(np.float64) - exact).sum()
        assert noise <= np.square(exact.astype(np.float64)).sum() * 10 ** (-decibels / 10)


def test_a_sum_that_overflows_on_a_longer_series_is_in_float32(tmp_path: Path) -> None:
    (said,) = notes(*summing(2000.0, [1, "n"]), tmp_path)
    assert said.startswith("2 nodes in float32: s")
    check_right(tmp_path, LONGER)


def test_with_a_policy_of_the_users_own_it_is_named(tmp_path: Path) -> None:
    said = notes(*summing(2000.0, [1, "n"]), tmp_path, policy="half")
    assert said == ("with larger sizes (n = 49), the file computes y as inf or NaN",)
    assert not np.isfinite(run_strict(tmp_path / "out" / "model.onnx", LONGER)["y"]).all()


@pytest.mark.parametrize(("level", "sizes"), [(20.0, [1, "n"]), (2000.0, [1, 16])])
def test_nothing_is_said_where_all_is_right_or_no_other_size_exists(
    level: float, sizes: list[int | str], tmp_path: Path
) -> None:
    assert notes(*summing(level, sizes), tmp_path) == ()


def test_inputs_that_the_original_refuses_are_left_out(tmp_path: Path) -> None:
    nodes = [node("Reshape", "x shape", "r"), node("Relu", "r", "y")]
    stored = {"shape": np.array([4, 4])}
    x = np.ones((1, 16), np.float32)
    assert notes(*graph(nodes, {"x": x}, [2], stored, {"x": [1, "n"]}), tmp_path) == ()


def test_rows_that_padding_masks_as_a_whole_are_right(tmp_path: Path) -> None:
    """In float32 the mask swallows the scores of such a row; a smaller one that float16 holds does not."""
    nodes = [
        node("MatMul", "q k", "scores"),
        node("Cast", "mask", "m", to=onnx.TensorProto.FLOAT),
        node("Mul", "m causal", "kept"),
        node("Sub", "one kept", "left_out"),
        node("Mul", "left_out lowest", "bias"),
        node("Add", "scores bias", "masked"),
        node("Softmax", "masked", "weights"),
        node("MatMul", "weights v", "y"),
    ]
    inputs = {"q": 40 * floats(1, 8, 8), "mask": np.ones((1, 1, 8), np.int64)}
    stored = {
        "k": floats(8, 8),
        "v": floats(8, 8),
        "causal": np.tril(np.ones((8, 8), np.float32)),
        "one": np.array(1, np.float32),
        "lowest": np.array(np.finfo(np.float32).min),
    }
    notes(*graph(nodes, inputs, [3], stored), tmp_path)
    check_right(tmp_path, inputs | {"mask": np.array([[[0, 0, 1, 1, 1, 1, 1, 1]]])})


def test_indices_at_the_end_of_a_table_are_right(tmp_path: Path) -> None:
    """Only the table's last row overflows the square."""
    table = floats(50, 4)
    table[-1] = 300.0
    nodes = [node("Gather", "table i", "g"), node("Mul", "g g", "s"), node("Div", "s large", "y")]
    stored = {"table": table, "large": np.array(100, np.float32)}
    inputs = {"i": np.arange(6)}
    notes(*graph(nodes, inputs, [2], stored, {"i": ["n"]}), tmp_path)
    check_right(tmp_path, {"i": np.array([49, 0, 49])})


def test_a_larger_count_of_turns_is_right(tmp_path: Path) -> None:
    """A sum grows with each turn of a loop, and leaves float16 after 33."""
    body = onnx.helper.make_graph(
        [node("Add", "h step", "grown"), node("Identity", "go", "goes")],
        "body",
        [
            onnx.helper.make_tensor_value_info("turn", onnx.TensorProto.INT64, []),
            onnx.helper.make_tensor_value_info("go", onnx.TensorProto.BOOL, []),
            onnx.helper.make_tensor_value_info("h", onnx.TensorProto.FLOAT, [4]),
        ],
        [
            onnx.helper.make_tensor_value_info("goes", onnx.TensorProto.BOOL, []),
            onnx.helper.make_tensor_value_info("grown", onnx.TensorProto.FLOAT, [4]),
        ],
    )
    loop = onnx.helper.make_node("Loop", ["turns", "", "x"], ["last"], name="loop", body=body)
    stored = {"step": np.array(2000, np.float32), "large": np.array(100, np.float32)}
    inputs = {"x": np.ones(4, np.float32), "turns": np.array(10)}
    notes(*graph([loop, node("Div", "last large", "y")], inputs, [1], stored), tmp_path)
    check_right(tmp_path, inputs | {"turns": np.array(60)})


@pytest.mark.parametrize(
    ("name", "sizes", "kind"),
    [("self", ["n", 4], np.float32), ("x", ["past+1", 4], np.float32), ("x", [3, 4], np.uint64)],
)
def test_inputs_of_any_name_size_and_type_are_taken(
    name: str, sizes: list[int | str], kind: type, tmp_path: Path
) -> None:
    nodes = [node("Cast", name, "c", to=onnx.TensorProto.FLOAT), node("Mul", "c c", "y")]
    x = np.arange(12).reshape(3, 4).astype(kind)
    notes(*graph(nodes, {name: x}, [2], {}, {name: sizes}), tmp_path)
    check_right(tmp_path, {name: 2 * x})


def test_an_overflow_beside_a_masked_output_is_seen(tmp_path: Path) -> None:
    """The original's -inf is a mask, and its other values are finite."""
    nodes = [node("ReduceSum", "x one", "s"), node("Where", "kept s masked", "y")]
    stored = {
        "one": np.array([1]),
        "kept": np.array([[True, False]]),
        "masked": np.array(-np.inf, np.float32),
    }
    x = np.full((1, 16), 2000.0, np.float32)
    notes(*graph(nodes, {"x": x}, [2], stored, {"x": [1, "n"]}), tmp_path)
    found = run_strict(tmp_path / "out" / "model.onnx", LONGER)["y"]
    assert found[0, 0] == pytest.approx(98_000)
