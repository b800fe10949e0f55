"""Nodes that would never end, fit no memory, or need types that torch has not: one line names each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from ampaudit.core.errors import SourceError
from ampaudit.source.onnx.files import read_onnx
from ampaudit.source.onnx.model import OnnxModel
from tests.support.onnx_graphs import initializer, model_of, node

HUGE = 1 << 40
HUGE_SIZES = initializer("n", np.array([HUGE, HUGE]))
ADDED = node("Add", ["x", "z"], ["y"])


def run(tmp_path: Path, model: Any) -> dict[str, torch.Tensor]:
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return OnnxModel(read_onnx(path)).eval()(torch.ones(2, 4))


def scalar(name: str, value: float, dtype: int = TensorProto.INT64) -> Any:
    return helper.make_tensor(name, dtype, [], [value])


LARGE: dict[str, tuple[list[Any], list[Any]]] = {
    "ConstantOfShape": ([node("ConstantOfShape", ["n"], ["z"], name="big"), ADDED], [HUGE_SIZES]),
    "Expand": (
        [node("Expand", ["x", "n"], ["y"], name="big")],
        [initializer("n", np.array([HUGE, 2, 4]))],
    ),
    "Expand of a constant": (
        [node("Expand", ["one", "n"], ["z"], name="big"), ADDED],
        [HUGE_SIZES, initializer("one", np.ones(1, np.int64))],
    ),
    "Tile": ([node("Tile", ["x", "n"], ["y"], name="big")], [HUGE_SIZES]),
    "Pad": (
        [node("Pad", ["x", "n"], ["y"], name="big")],
        [initializer("n", np.array([0, 0, HUGE, 0]))],
    ),
    "Range": (
        [node("Range", ["a", "b", "c"], ["z"], name="big"), ADDED],
        [scalar("a", 0), scalar("b", HUGE), scalar("c", 1)],
    ),
    "OneHot": (
        [node("OneHot", ["i", "d", "v"], ["z"], name="big"), ADDED],
        [
            initializer("i", np.array([1])),
            scalar("d", HUGE),
            initializer("v", np.array([0, 1], np.float32)),
        ],
    ),
    "RandomNormal": ([node("RandomNormal", [], ["z"], name="big", shape=[HUGE]), ADDED], []),
    "Resize": (
        [node("Resize", ["x", "", "", "n"], ["y"], name="big", mode="nearest")],
        [initializer("n", np.array([2, HUGE]))],
    ),
}


@pytest.mark.parametrize(("nodes", "stored"), LARGE.values(), ids=LARGE)
def test_results_that_fit_no_memory_are_refused(nodes: list[Any], stored: list[Any], tmp_path: Path) -> None:
    named = f"the node big ({nodes[0].op_type}): its result has "
    with pytest.raises(SourceError) as raised:
        run(tmp_path, model_of(nodes, stored))
    assert named in raised.value.args[0]
    assert "\n" not in raised.value.args[0]


def loop_body(*nodes: Any) -> Any:
    inputs = [("i", TensorProto.INT64), ("going", TensorProto.BOOL), ("v", TensorProto.FLOAT)]
    names = ("on", "w") if nodes else ("going", "v")
    outputs = list(zip(names, (TensorProto.BOOL, TensorProto.FLOAT), strict=True))
    made = helper.make_tensor_value_info
    typed = [[made(name, kind, None) for name, kind in side] for side in (inputs, outputs)]
    return helper.make_graph(list(nodes), "body", *typed)


STEP = [node("Identity", ["going"], ["on"]), node("Relu", ["v"], ["w"])]


@pytest.mark.parametrize("limit", ["m", ""])
@pytest.mark.parametrize("nodes", [STEP, []], ids=["steps", "nothing"])
def test_loops_without_an_end_are_refused(limit: str, nodes: list[Any], tmp_path: Path) -> None:
    loop = node("Loop", [limit, "", "x"], ["y"], name="forever", body=loop_body(*nodes))
    start = time.monotonic()
    with pytest.raises(SourceError, match=r"the node forever \(Loop\): more than 20,000 nodes run in bodies"):
        run(tmp_path, model_of([loop], [scalar("m", 10**12)]))
    assert time.monotonic() - start < 30


def test_loops_in_loops_count_together(tmp_path: Path) -> None:
    """None of them has many trips."""
    inner = loop_body(*STEP)
    for _ in range(3):
        again = node("Loop", ["m", "", "v"], ["w"], name="inner", body=inner)
        inner = loop_body(node("Identity", ["going"], ["on"]), again)
    outer = node("Loop", ["m", "", "x"], ["y"], name="outer", body=inner)
    with pytest.raises(SourceError, match="more than 20,000 nodes run in bodies"):
        run(tmp_path, model_of([outer], [scalar("m", 100)]))


def test_a_long_loop_runs(tmp_path: Path) -> None:
    loop = node("Loop", ["m", "", "x"], ["y"], body=loop_body(*STEP))
    assert torch.equal(run(tmp_path, model_of([loop], [scalar("m", 1000)]))["y"], torch.ones(2, 4))


FEW_BITS: dict[str, tuple[list[Any], list[Any], str]] = {
    "to a zero point of four bits": (
        [
            node("QuantizeLinear", ["x", "s", "few"], ["q"], name="quantize"),
            node("DequantizeLinear", ["q", "s", "few"], ["y"]),
        ],
        [scalar("s", 1.0, TensorProto.FLOAT), scalar("few", 0, TensorProto.INT4)],
        "the node quantize (QuantizeLinear): torch has no type INT4",
    ),
    "to a type that is named": (
        [
            node("QuantizeLinear", ["x", "s"], ["q"], name="quantize", output_dtype=TensorProto.UINT4),
            node("DequantizeLinear", ["q", "s"], ["y"]),
        ],
        [scalar("s", 1.0, TensorProto.FLOAT)],
        "the node quantize (QuantizeLinear): torch has no type UINT4",
    ),
    "a cast": (
        [
            node("Cast", ["x"], ["q"], name="cast", to=TensorProto.FLOAT4E2M1),
            node("Cast", ["q"], ["y"], to=1),
        ],
        [],
        "the node cast (Cast): torch has no type FLOAT4E2M1",
    ),
    "a cast like another": (
        [
            node("Constant", [], ["few"], value=scalar("", 1, TensorProto.UINT4)),
            node("CastLike", ["x", "few"], ["q"], name="cast"),
            node("Cast", ["q"], ["y"], to=1),
        ],
        [],
        "the node cast (CastLike): torch has no type UINT4",
    ),
    "a constant": (
        [
            node("Constant", [], ["half"], value=scalar("", 0.5, TensorProto.FLOAT4E2M1)),
            node("Cast", ["half"], ["z"], to=1),
            ADDED,
        ],
        [],
        "the tensor 'half' has the type FLOAT4E2M1",
    ),
    "a scale of a power of two": (
        [node("Cast", ["few"], ["z"], to=1), ADDED],
        [scalar("few", 0.5, TensorProto.FLOAT8E8M0)],
        "the tensor 'few' has the type FLOAT8E8M0",
    ),
    "a fill": (
        [
            node(
                "ConstantOfShape",
                ["n"],
                ["q"],
                name="fill",
                value=helper.make_tensor("", TensorProto.FLOAT4E2M1, [1], [0.5]),
            ),
            node("Cast", ["q"], ["z"], to=1),
            ADDED,
        ],
        [initializer("n", np.array([2, 4]))],
        "the node fill (ConstantOfShape): torch has no type FLOAT4E2M1",
    ),
}


@pytest.mark.parametrize(("nodes", "stored", "said"), FEW_BITS.values(), ids=FEW_BITS)
def test_types_of_few_bits_are_refused(
    nodes: list[Any], stored: list[Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(SourceError) as raised:
        run(tmp_path, model_of(nodes, stored, opset=24))
    assert said in raised.value.args[0]


def test_weights_of_four_bits_are_dequantized(tmp_path: Path) -> None:
    weight = helper.make_tensor("w", TensorProto.INT4, [4], [-8, 7, 1, 0])
    nodes = [node("DequantizeLinear", ["w", "s"], ["z"]), ADDED]
    found = run(tmp_path, model_of(nodes, [weight, scalar("s", 0.5, TensorProto.FLOAT)], opset=23))["y"]
    assert found.tolist() == [[-3.0, 4.5, 1.5, 1.0]] * 2


@pytest.mark.parametrize(("inner", "said"), [("StringConcat", "no operator"), ("Reshape", "shape")])
def test_errors_in_functions_name_the_file_once(inner: str, said: str, tmp_path: Path) -> None:
    sets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]

    def function(name: str, body: Any) -> Any:
        return helper.make_function("own", name, ["x"], ["y"], [body], sets)

    functions = [
        function("F0", node("F1", ["x"], ["y"], name="middle", domain="own")),
        function("F1", node(inner, ["x", "x"], ["y"], name="inmost")),
    ]
    with pytest.raises(SourceError) as raised:
        run(tmp_path, model_of([node("F0", ["x"], ["y"], domain="own")], functions=functions, opset=20))
    message = raised.value.args[0]
    assert message.count("model.onnx") == 1
    assert f"the node inmost ({inner}): " in message
    assert said in message


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("w", (1, 12, 3)), ("r", (1, 8, 3)), ("b", (1, 23)), ("h", (1, 5, 3)), ("c", (1, 5, 3))],
)
def test_recurrent_layers_of_wrong_sizes_are_refused(
    name: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """Torch's LSTM does not check sizes: it would read and write beyond the end of a tensor."""
    right = {"w": (1, 12, 4), "r": (1, 12, 3), "b": (1, 24), "h": (1, 1, 3), "c": (1, 1, 3)}
    stored = [initializer(key, np.zeros(size, np.float32)) for key, size in (right | {name: sizes}).items()]
    nodes = [
        node("Unsqueeze", ["x", "one"], ["z"]),
        node("LSTM", ["z", "w", "r", "b", "", "h", "c"], ["y"], name="layer", hidden_size=3),
    ]
    with pytest.raises(SourceError, match=r"the node layer \(LSTM\): .* should have"):
        run(tmp_path, model_of(nodes, [*stored, initializer("one", np.array([1]))]))


def test_an_unknown_operator_gets_a_next_step(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"the node own \(Unheard\): no operator Unheard") as raised:
        run(tmp_path, model_of([node("Unheard", ["x"], ["y"], name="own", domain="acme")]))
    assert raised.value.hint is not None
    assert "docs/onnx-operators.md" in raised.value.hint
