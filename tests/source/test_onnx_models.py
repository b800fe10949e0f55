"""The ONNX models of tests and benchmarks are what they claim, and strict runs round every value."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper

from benchmarks.onnx_conversion import count_ops
from benchmarks.onnx_conversion import verdict as judge
from tests.support.onnx_models import GENERATED, build
from tests.support.onnx_models.case import Arrays, Graph, value
from tests.support.onnx_models.odd import ODD, REFUSED_BY
from tests.support.onnx_models.pairs import BROKEN, pair
from tests.support.onnx_models.planted import PLANTED, planted
from tests.support.onnx_strict import run_fp32, run_strict

HALF, BFLOAT16 = TensorProto.FLOAT16, TensorProto.BFLOAT16
Generated = Callable[[str], tuple[Path, Arrays]]
EXPORTED = {name for name, place in GENERATED.items() if place.startswith("exported.")}


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Generated:
    """Build each model once."""
    return cache(lambda name: build(name, tmp_path_factory.mktemp(name)))


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def values_of(model: onnx.ModelProto, inputs: Arrays, folder: Path, **options: object) -> Arrays:
    return run_strict(saved(model, folder), inputs, every=True, **options)  # type: ignore[arg-type]


def test_a_square_that_onnxruntime_does_not_round_overflows(tmp_path: Path) -> None:
    """NumPy's own float16 is the oracle."""
    graph = Graph({"x": np.array([1000.0, 3.0], np.float16)})
    graph.add("Mul", "x x", "square")
    graph.add("Sqrt", "square", "y")
    path = saved(graph.model({"y": HALF}), tmp_path)
    assert run_fp32(path, graph.inputs)["y"][0] == 1000
    with np.errstate(over="ignore"):
        expected = np.sqrt(graph.inputs["x"] * graph.inputs["x"])
    assert np.isinf(expected[0])
    np.testing.assert_array_equal(run_strict(path, graph.inputs)["y"], expected)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("kind", "dtype"), [(HALF, torch.float16), (BFLOAT16, torch.bfloat16)])
def test_strict_runs_agree_with_torch(tmp_path: Path, kind: int, dtype: torch.dtype) -> None:
    """Inputs, stored weights, bodies and functions are rounded; torch's own kernels are the oracle."""
    stored = np.float16 if kind == HALF else ml_dtypes.bfloat16
    x, w = np.random.default_rng(0).standard_normal((2, 5, 7), dtype=np.float32)
    graph = Graph({"x": x, "yes": np.array(True)}, domains=("local",))
    graph.keep("w", w, stored)
    graph.add("Cast", "x", "narrow", to=kind)
    graph.add("SquarePlus", "narrow w", "sum", domain="local")
    graph.functions = [square_plus(graph.opset)]
    branches = [product("then", "sum", kind), product("else", "w", kind)]
    graph.add("If", "yes", "y", then_branch=branches[0], else_branch=branches[1])
    narrow, weight = torch.from_numpy(x).to(dtype), torch.from_numpy(w).to(dtype)
    total = narrow * narrow + weight
    found = run_strict(saved(graph.model({"y": kind}), tmp_path), graph.inputs)["y"]
    np.testing.assert_array_equal(found, (total * weight + weight).float().numpy())
    assert not np.array_equal(found, (x * x + w) * w + w)


def square_plus(opset: int) -> onnx.FunctionProto:
    nodes = [helper.make_node("Mul", ["a", "a"], ["s"]), helper.make_node("Add", ["s", "b"], ["c"])]
    return helper.make_function(
        "local", "SquarePlus", ["a", "b"], ["c"], nodes, [helper.make_opsetid("", opset)]
    )


def product(name: str, factor: str, kind: int) -> onnx.GraphProto:
    nodes = [
        helper.make_node("Mul", [factor, "w"], [f"{name}_m"]),
        helper.make_node("Add", [f"{name}_m", "w"], [f"{name}_y"]),
    ]
    return helper.make_graph(nodes, name, [], [value(f"{name}_y", (5, 7), kind)])


@pytest.mark.parametrize("name", GENERATED)
def test_generated_models_run_and_are_deterministic(name: str, generated: Generated, tmp_path: Path) -> None:
    path, inputs = generated(name)
    onnx.checker.check_model(path, full_check=True)
    plain, strict = run_fp32(path, inputs), run_strict(path, inputs)
    for output, array in plain.items():
        assert np.isfinite(array).all()
        np.testing.assert_allclose(strict[output], array, rtol=1e-4, atol=1e-5)
    if name not in EXPORTED - {"resnet"}:  # one stands for those of the exporter
        other, again = build(name, tmp_path, fresh=True)
        for file in path.parent.iterdir():
            assert (other.parent / file.name).read_bytes() == file.read_bytes()
        assert all(np.array_equal(again[key], array) for key, array in inputs.items())


def test_the_residual_stream_of_t5_overflows_without_a_trace(generated: Generated) -> None:
    """Wholly in float16 every output is NaN or 0."""
    path, inputs = generated("t5")
    values = run_strict(path, inputs, every=True)
    peaks = {n: np.abs(a).max() for n, a in values.items() if a.dtype == np.float32}
    assert 1.2e5 < max(v for n, v in peaks.items() if n.startswith("linear")) < 2.5e5
    (hidden,) = run_strict(path, inputs, assume=HALF).values()
    assert not (np.isfinite(hidden) & (hidden != 0)).any()


def test_the_sum_of_the_mixed_model_is_2e5(generated: Generated) -> None:
    path, inputs = generated("mixed")
    assert 1.5e5 < run_strict(path, inputs, every=True)["total"] < 2.5e5


@pytest.mark.parametrize("name", ODD)
def test_odd_graphs_are_valid(name: str, tmp_path: Path) -> None:
    model, inputs = ODD[name]()
    path = saved(model, tmp_path)
    if REFUSED_BY.get(name) == "onnx.checker":
        with pytest.raises(onnx.shape_inference.InferenceError):
            onnx.checker.check_model(path, full_check=True)
    else:
        onnx.checker.check_model(path, full_check=True)
    if REFUSED_BY.get(name) == "onnxruntime":
        with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.Fail, match="same node name"):
            run_fp32(path, inputs)
        return
    plain = run_fp32(path, inputs)
    for output, found in run_strict(path, inputs).items():
        if found.dtype.kind != "f":
            assert np.array_equal(found, plain[output])
        elif name == "cast_from_half":
            np.testing.assert_allclose(found, plain[output], rtol=1e-2)
        else:
            np.testing.assert_allclose(found, plain[output], rtol=1e-6)


def first_bad(model: onnx.ModelProto, is_bad: dict[str, bool]) -> str:
    """Name the first node with a bad output; of an If, the last node of the branch that is taken."""
    node = next(n for n in model.graph.node if is_bad[n.output[0]])
    bodies = {a.name: a.g for a in node.attribute if a.HasField("g")}
    return bodies["then_branch"].node[-1].name if bodies else node.name


@pytest.mark.parametrize("name", PLANTED)
def test_one_node_overflows_where_it_was_planted(name: str, tmp_path: Path) -> None:
    """It is the first that is not finite in float16, and the only one beyond its range in float32."""
    case = planted(name)
    wide = values_of(case.model, case.inputs, tmp_path)
    narrow = values_of(case.model, case.inputs, tmp_path, assume=HALF)
    beyond = [n for n, a in wide.items() if a.dtype == np.float32 and np.abs(a).max() > 65504]
    assert len(beyond) == 1
    assert first_bad(case.model, {n: n in beyond for n in wide}) == case.node
    assert first_bad(case.model, {n: not np.isfinite(a).all() for n, a in narrow.items()}) == case.node
    twin = planted(name, healthy=True)
    assert twin.node is None
    healthy = values_of(twin.model, twin.inputs, tmp_path, assume=HALF)
    exact = values_of(twin.model, twin.inputs, tmp_path)
    np.testing.assert_allclose(healthy["y"], exact["y"], rtol=0, atol=1e-2 * np.abs(exact["y"]).max())
    assert all(np.isfinite(a).all() for a in healthy.values())


@pytest.mark.parametrize("name", BROKEN)
def test_a_conversion_is_broken_at_the_named_node(name: str, tmp_path: Path) -> None:
    made = pair(name)
    exact = values_of(made.original, made.inputs, tmp_path)
    good = values_of(made.good, made.inputs, tmp_path)
    bad = values_of(made.bad, made.inputs, tmp_path)
    assert [n.name for n in made.good.graph.node if n.op_type != "Cast"] == [
        n.name for n in made.original.graph.node
    ]
    assert worst(good, exact, "log") < 2e-3
    assert not worst(bad, exact, "log") < 0.1
    nodes = [n.output[0] for n in made.original.graph.node]
    if name == "dropped_eps":  # small numbers that become 0
        assert (bad["log_eps"] == 0).any()
        assert (good["log_eps"] > 0).all()
        assert all(worst(bad, exact, node) < 5e-3 for node in nodes[: nodes.index(made.node)])
    else:
        assert next(node for node in nodes if not worst(bad, exact, node) < 0.1) == made.node


def test_the_benchmark_counts_and_judges() -> None:
    good = pair("wrong_constant").good
    assert count_ops(good) == ({TensorProto.FLOAT, HALF, TensorProto.INT64}, 7, 4)
    exact = {"y": np.array([1.0, 2.0], np.float32), "index": np.array([1])}
    changes = {"ok": [1.0, 2.001], "wrong": [1.0, 2.1], "zeros": [0.0, 0.0]}
    changes |= {"Inf": [1.0, np.inf], "NaN": [np.nan, np.inf]}
    for verdict, changed in changes.items():
        assert judge({"y": np.array(changed, np.float32)}, exact, 1e-2)["verdict"] == verdict


def worst(found: Arrays, exact: Arrays, name: str) -> NDArray:
    return np.abs(found[name] - exact[name]).max() / np.abs(exact[name]).max()
