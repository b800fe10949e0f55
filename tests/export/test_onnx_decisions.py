"""Choices that a converted file returns: counted where they change, and computed in float32 before that."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from ampaudit.export.onnx.outputs import comparable_outputs, describe_inaccurate, orderings
from ampaudit.export.program import compare_output
from ampaudit.report.conversion import OutputRecord
from tests.support.onnx_conversion import converted_graph
from tests.support.onnx_strict import run_strict
from tests.support.onnx_typed import Arrays, floats, graph, node, ran


def near_ties() -> tuple[onnx.ModelProto, Arrays]:
    """Label 64 rows by scores of which many pairs are closer than float16 tells apart."""
    w = floats(32, 200)
    w[:, 1::2] = w[:, ::2] * np.float32(1 + 2e-4)
    nodes = [node("MatMul", "x w", "scores"), node("ArgMax", "scores", "label", axis=-1, keepdims=0)]
    label = helper.make_tensor_value_info("label", TensorProto.INT64, ["n"])
    return graph(nodes, {"x": floats(64, 32)}, [label], {"w": w}, {"x": ["n", 32]})


def test_choices_between_near_ties_are_made_in_float32(tmp_path: Path) -> None:
    made = converted_graph(*near_ties(), tmp_path)
    assert any("MatMul" in note or "scores" in note for note in made.notes)  # it stays in float32
    x = floats(300, 32)
    changed = (
        run_strict(tmp_path / "out" / "model.onnx", {"x": x})["label"]
        != ran(tmp_path / "before.onnx", {"x": x})[0]
    )
    assert changed.mean() <= 0.01


def test_a_policy_of_the_users_own_is_kept_and_the_change_is_told(tmp_path: Path) -> None:
    made = converted_graph(*near_ties(), tmp_path, policy="half", fail_on="never")
    (label,) = made.outputs
    assert label.sqnr_db is not None
    assert label.sqnr_db < 40  # more than one in a hundred
    assert "differ from FP32" in str(made)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=8), st.data())
def test_rows_of_equal_integers_are_compared_in_any_number(
    exact: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Oracle: values are a function of the row, so that paired rows have equal values."""
    kept = data.draw(st.lists(st.sampled_from(exact), unique=True, max_size=5)) if exact else []
    more = data.draw(st.lists(st.tuples(st.integers(5, 9), st.integers(0, 9)), max_size=3))
    ours = data.draw(st.permutations([*kept, *more]))

    def outputs(rows: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
        chosen = torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)
        return {"rows": chosen, "values": chosen.float() @ torch.tensor([[1.0, 10.0], [3.0, 0.5]])}

    pairs = comparable_outputs(outputs(list(ours)), outputs(exact))
    if len(ours) != len(exact):
        mine, theirs = pairs["values"]
        assert torch.equal(mine, theirs)
        mine, theirs = pairs["rows"]
        assert len(mine) == len(theirs) == max(len(ours), len(exact))
        agree = (mine == theirs).all(1).sum()
        assert agree == len(kept)


def test_values_of_other_labels_are_left_out_and_those_of_equal_ones_are_not() -> None:
    exact = {
        "label": torch.tensor([1, 2, 3]),
        "score": torch.tensor([0.5, 0.25, 0.125]),
        "box": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        "mean": torch.tensor([7.0]),
    }
    ours = {
        "label": torch.tensor([1, 0, 3]),
        "score": torch.tensor([0.5, 9.0, 0.125]),
        "box": torch.tensor([[1.0, 2.0], [9.0, 9.0], [5.0, 6.5]]),
        "mean": torch.tensor([7.5]),
    }
    found = {name: compare_output(*pair)[0] for name, pair in comparable_outputs(ours, exact).items()}
    assert found == {"label": 2.0, "score": 0.0, "box": 0.5, "mean": 0.5}


@given(st.integers(1, 3), st.integers(1, 5), st.data())
def test_the_order_of_the_best_is_no_choice(groups: int, count: int, data: st.DataObject) -> None:
    """Oracle: sets."""
    exact = [data.draw(st.permutations(range(9)))[:count] for _ in range(groups)]
    ours = [data.draw(st.permutations(range(9)))[:count] for _ in range(groups)]

    def outputs(rows: list[list[int]]) -> dict[str, torch.Tensor]:
        chosen = torch.tensor(rows)
        return {"best": chosen, "score": 2.0 * chosen + torch.arange(groups)[:, None]}

    pairs = comparable_outputs(outputs(ours), outputs(exact), {"best": "TopK"})
    common = sum(len({*mine} & {*theirs}) for mine, theirs in zip(ours, exact, strict=True))
    mine, theirs = pairs["best"]
    assert len(mine) == len(theirs) == groups * count
    assert (mine == theirs).sum() == common
    mine, theirs = pairs["score"]
    assert torch.equal(mine, theirs)
    assert len(mine) == common


@pytest.mark.parametrize(
    ("ours", "exact", "found"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], (0.0, None)),
        ([1, 2, 3, 9], [1, 2, 3, 4], (5.0, 12.04)),
        ([-(2**63), 3], [0, 3], (2.0**63, 6.02)),
        ([True, False], [True, True], (1.0, 6.02)),
        ([1.0, float("inf")], [1.0, float("inf")], (0.0, None)),
        ([float("nan"), 2.0], [float("nan"), 2.0], (0.0, None)),
        ([1.0, float("inf")], [1.0, 2.0], (None, None)),
        ([1.0, 2.0], [1.0, float("inf")], (None, None)),
        ([1.0], [1.0, 2.0], (None, None)),
        ([], [], (0.0, None)),
    ],
)
def test_outputs_are_compared(ours: list[float], exact: list[float], found: tuple[float, float]) -> None:
    assert compare_output(torch.tensor(ours), torch.tensor(exact)) == found


def test_what_is_broken_is_compared_beside_other_choices_too() -> None:
    label = torch.arange(200)
    exact = {"label": label, "score": torch.ones(200), "masked": torch.where(label < 9, -math.inf, 1.0)}
    ours = {"label": label.clone(), "score": torch.ones(200), "masked": exact["masked"].clone()}
    ours["label"][7], ours["score"][7], ours["masked"][11] = 0, math.nan, math.inf
    ours["label"][11] = 0
    pairs = comparable_outputs(ours, exact)
    assert compare_output(*pairs["score"]) == (None, None)
    assert compare_output(*pairs["masked"]) == (None, None)
    ours["score"][7], ours["masked"][11] = 5.0, 5.0
    pairs = comparable_outputs(ours, exact)
    assert compare_output(*pairs["score"]) == compare_output(*pairs["masked"]) == (0.0, None)


def test_two_choices_of_one_shape_are_paired_each_by_itself() -> None:
    exact = {"a": torch.tensor([[1, 2]]), "b": torch.tensor([[2, 1]])}
    ours = {"a": torch.tensor([[2, 1]]), "b": torch.tensor([[2, 9]])}
    pairs = comparable_outputs(ours, exact, dict.fromkeys("ab", "TopK"))
    assert compare_output(*pairs["a"]) == (0.0, None)
    assert compare_output(*pairs["b"]) == (1.0, 6.02)


def test_a_choice_of_nothing_is_compared() -> None:
    nothing = {"best": torch.zeros(2, 0, dtype=torch.int64)}
    assert compare_output(*comparable_outputs(nothing, nothing, {"best": "TopK"})["best"]) == (0.0, None)


@pytest.mark.parametrize(
    ("axis", "after", "ordered"),
    [(-1, "Identity", True), (1, "Identity", True), (0, "Identity", False), (-1, "Flatten", False)],
)
def test_the_order_counts_but_along_the_last_axis(axis: int, after: str, *, ordered: bool) -> None:
    nodes = [node("TopK", "x k", "top best", axis=axis), node(after, "best", "i")]
    output = helper.make_tensor_value_info("i", TensorProto.INT64, ["a", "b"])
    model, _ = graph(nodes, {"x": floats(4, 5)}, [output], {"k": np.array([2])})
    assert orderings(ir.from_proto(model)) == ({"i": "TopK"} if ordered else {})


def test_what_is_zero_in_float32_is_not_exact_whatever_it_becomes() -> None:
    records = [OutputRecord("y", "float32", "", error, None) for error in (0.0, 1e-4, 100.0)]
    assert describe_inaccurate(records, 20.0) == "y as 1e+02, where the original is zero"


def test_an_output_that_the_audit_finds_inaccurate_gets_more_float32(tmp_path: Path) -> None:
    """The logistic map doubles an error in each turn, and none of its ops is inaccurate by itself."""
    nodes = [node("Sigmoid", "x", "h0")]
    for turn in range(9):
        nodes += [
            node("Sub", f"one h{turn}", f"rest{turn}"),
            node("Mul", f"h{turn} rest{turn}", f"product{turn}"),
            node("Mul", f"product{turn} rate", f"h{turn + 1}"),
        ]
    stored = {"one": np.array(1, np.float32), "rate": np.array(3.9, np.float32)}
    made, inputs = graph([*nodes, node("Identity", "h9", "y")], {"x": floats(64, 8)}, [2], stored)
    converted_graph(made, inputs, tmp_path, dtype="bfloat16")
    (exact,) = ran(tmp_path / "before.onnx", inputs)
    error = run_strict(tmp_path / "out" / "model.onnx", inputs)["y"] - exact
    assert 10 * np.log10(np.square(exact).sum() / np.square(error).sum()) >= 20
