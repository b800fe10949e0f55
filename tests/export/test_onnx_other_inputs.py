"""A converted file is run on inputs that nobody gave, and what breaks there is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import ampaudit
from tests.support.onnx_strict import run_strict
from tests.support.onnx_typed import Arrays, graph, node, ran


def summing(level: float, sizes: list[int | str]) -> tuple[onnx.ModelProto, Arrays]:
    """Add up a series; of 16 values of 2,000 the sum is within float16, of 49 it is not."""
    nodes = [node("ReduceSum", "x one", "s", keepdims=0), node("Div", "s large", "y")]
    stored = {"one": np.array([1]), "large": np.array(100, np.float32)}
    x = np.full((1, 16), level, np.float32)
    return graph(nodes, {"x": x}, [1], stored, {"x": sizes})


def notes(model: onnx.ModelProto, inputs: Arrays, folder: Path) -> tuple[str, ...]:
    onnx.save(model, folder / "before.onnx")
    np.savez(folder / "inputs.npz", **inputs)
    source = ampaudit.SourceConfig(inputs=folder / "inputs.npz")
    _, made = ampaudit.convert(str(folder / "before.onnx"), None, folder / "out", source=source)
    assert made is not None
    return made.notes


def test_a_sum_that_overflows_on_a_longer_series_is_named(tmp_path: Path) -> None:
    said = notes(*summing(2000.0, [1, "n"]), tmp_path)
    assert said == ("with larger sizes (n = 49), the written file computes y as inf or NaN",)
    longer = {"x": np.full((1, 49), 2000.0, np.float32)}
    assert not np.isfinite(run_strict(tmp_path / "out" / "model.onnx", longer)["y"]).all()
    assert np.isfinite(ran(tmp_path / "before.onnx", longer)[0]).all()


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
