"""Files that lie, end early or never end: each gets one line that names the file and the node."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import ampaudit
from ampaudit.core.errors import SourceError
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.untrusted import MAX_MESSAGE
from ampaudit.source.onnx import files
from ampaudit.source.onnx.checks import MAX_NODES
from ampaudit.source.onnx.files import read_onnx
from ampaudit.source.onnx.model import OnnxModel
from ampaudit.source.open import open_source
from tests.support.clock import soon
from tests.support.onnx_graphs import external, initializer, mlp, model_of, node, tensor, value, written

ONES = np.ones((4, 4), np.float32)
PRODUCT = [node("MatMul", ["x", "w"], ["y"], name="product")]


def _changed(model: Any, **fields: Any) -> Any:
    for name, item in fields.items():
        model.ClearField(name)
        if item is not None:
            setattr(model, name, item)
    return model


def _sparse() -> Any:
    model = model_of(PRODUCT)
    stored = model.graph.sparse_initializer.add()
    stored.values.CopyFrom(initializer("w", np.ones(2, np.float32)))
    return model


def _of_types(kind: Any) -> Any:
    """A graph whose input has a type that no tensor of torch has."""
    model = model_of(PRODUCT)
    model.graph.input[0].type.CopyFrom(kind)
    return model


def _function(name: str, *nodes: Any) -> Any:
    sets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    return helper.make_function("own", name, ["x"], ["y"], list(nodes), sets)


def _calling(*functions: Any) -> Any:
    return model_of([node("F0", ["x"], ["y"], name="call", domain="own")], functions=functions)


def _call(name: str, given: str = "x", result: str = "y") -> Any:
    return node(name, [given], [result], domain="own", name=f"to_{name}")


def _chain(count: int, calls: int) -> Any:
    """Functions that each call the next one, once or twice."""
    twice = [[_call(f"F{i + 1}", "x", "z"), _call(f"F{i + 1}", "z")] for i in range(count)]
    return _calling(
        *(_function(f"F{i}", *nodes[:calls] if calls == 2 else nodes[-1:]) for i, nodes in enumerate(twice)),
        _function(f"F{count}", node("Relu", ["x"], ["y"])),
    )


def _in_standard_domain(model: Any) -> Any:
    """Move functions to the standard domain, which their callers name ``ai.onnx``."""
    for part in (model.graph, *model.functions):
        for call in part.node:
            call.domain = "ai.onnx" if call.domain == "own" else ""
    for function in model.functions:
        function.domain = ""
    return model


def _with_x(model: Any) -> Any:
    """Make functions that call once read their input."""
    for function in model.functions:
        for call in function.node:
            if call.input[0] == "z" and len(function.node) == 1:
                call.input[0] = "x"
    return model


def _nested(depth: int) -> bytes:
    """Bodies within each other, which no library of ONNX would write."""

    def message(number: int, content: bytes) -> bytes:
        return files._message(number, content)

    body = message(1, message(1, b"x") + message(2, b"o") + message(4, b"Relu"))
    for _ in range(depth):
        attribute = message(1, b"then_branch") + message(6, body) + b"\xa0\x01\x05"
        body = message(1, message(1, b"c") + message(2, b"o") + message(4, b"If") + message(5, attribute))
    return b"\x08\x0a" + message(7, body)


BAD_GRAPHS: dict[str, tuple[Any, str]] = {
    "cycle": (
        model_of(
            [
                node("Add", ["x", "b"], ["a"], name="first"),
                node("Relu", ["a"], ["b"], name="second"),
                node("Relu", ["b"], ["y"], name="third"),
            ]
        ),
        "(Add) depends on its own result",
    ),
    "its own input": (
        model_of([node("Add", ["x", "y"], ["y"], name="own")]),
        "own (Add) depends on its own result",
    ),
    "missing input": (
        model_of([node("Relu", ["nothing"], ["y"], name="act")]),
        "the node act (Relu) reads 'nothing', which nothing computes",
    ),
    "missing output": (model_of([node("Relu", ["x"], ["z"])]), "nothing computes the output 'y'"),
    "a name twice": (
        model_of([node("Relu", ["x"], ["y"], name="act"), node("Exp", ["x"], ["y"], name="again")]),
        "the node again (Exp) computes 'y' a second time",
    ),
    "an input twice": (
        model_of([node("Relu", ["x"], ["y"])], inputs=[value("x", 2)] * 2),
        "the input 'x' is defined twice",
    ),
    "an initializer twice": (
        model_of(PRODUCT, [initializer("w", ONES), initializer("w", ONES)]),
        "the initializer 'w' is defined twice",
    ),
    "an operator set of the future": (
        model_of([node("Relu", ["x"], ["y"])], opset=999),
        "needs operator set 999",
    ),
    "no operator set": (
        _changed(model_of([node("Relu", ["x"], ["y"])]), opset_import=None),
        "imports no operator set",
    ),
    "a format of the future": (
        _changed(model_of([node("Relu", ["x"], ["y"])]), ir_version=9999),
        "has IR version 9999",
    ),
    "no graph": (_changed(model_of([]), graph=None), "has no graph with outputs"),
    "sparse": (_sparse(), "the initializer 'w' is sparse"),
    "more outputs": (
        model_of([node("Relu", ["x"], ["y", "z"], name="act")]),
        "the node act (Relu) has 2 outputs; its operator has 0 to 1",
    ),
    "more inputs": (
        model_of([node("Relu", ["x"] * 5, ["y"], name="act")]),
        "the node act (Relu) has 5 inputs",
    ),
    "an attribute of another type": (
        model_of([node("Softmax", ["x"], ["y"], name="soft", axis="last")]),
        "the node soft (Softmax): its attribute axis must be of type INT",
    ),
    "an attribute that is missing": (
        model_of([node("Cast", ["x"], ["y"], name="cast")]),
        "the node cast (Cast) lacks the attribute to",
    ),
    "a constant of text": (
        model_of([node("Constant", [], ["y"], name="text", value_string="s")]),
        "the constant 'text' is not a number",
    ),
    "text": (
        model_of(PRODUCT, [helper.make_tensor("w", TensorProto.STRING, [1], [b"a"])]),
        "the tensor 'w' has the type STRING",
    ),
    "large text": (model_of(PRODUCT, [tensor([9000], b"\0" * 9000, TensorProto.STRING)]), "the type STRING"),
    "no type": (model_of(PRODUCT, [tensor([4, 4], b"\0" * 64, 0)]), "the tensor 'w' has the type UNDEFINED"),
    "sizes without data": (
        model_of(PRODUCT, [tensor([2**31, 2**31], b"\0")]),
        "has the shape [2147483648, 2",
    ),
    "no data, and an overflow": (model_of(PRODUCT, [tensor([0, 2**62, 2**62], b"")]), "has the shape [0, 4"),
    "a negative size": (model_of(PRODUCT, [tensor([-4, -4], b"\0" * 64)]), "has the shape [-4, -4]"),
    "a hundred axes": (model_of(PRODUCT, [tensor([1] * 100, b"\0" * 4)]), "has the shape [1, 1"),
    "less data": (model_of(PRODUCT, [tensor([4, 4], b"\0" * 61)]), "the tensor 'w' of 64 bytes has 61"),
    "less data, mapped": (
        model_of(PRODUCT, [tensor([4, 4000], b"\0" * 8000)]),
        "lies outside its data (8,000",
    ),
    "a function that calls itself": (_calling(_function("F0", _call("F0"))), "to_F0 (F0) calls the function"),
    "functions that call each other": (
        _calling(_function("F0", _call("F1")), _function("F1", _call("F0"))),
        "calls the function that contains it",
    ),
    "deep calls": (_with_x(_chain(3000, 1)), "functions call each other more than 50 deep"),
    "calls that multiply": (_chain(40, 2), f"more than {MAX_NODES:,} nodes run"),
    "calls by another name": (_in_standard_domain(_chain(40, 2)), f"more than {MAX_NODES:,} nodes run"),
    "a function twice": (
        _calling(*[_function("F0", node("Relu", ["x"], ["y"]))] * 2),
        "defines a function twice",
    ),
    "deep bodies": (_nested(500), "is not an ONNX model, or damaged"),
    "a long name": (model_of([node("Relu", ["x"], ["y"], name="a" * 10**6)]), "has 1,000,000 characters"),
    "text in a file": (b"<!DOCTYPE html><html></html>", "is not an ONNX model, or damaged"),
    "an archive": (b"PK\x03\x04" + b"\0" * 100, "is not an ONNX model, or damaged"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
    "empty": (b"", "is empty"),
    "text for a graph": (
        _of_types(helper.make_tensor_type_proto(TensorProto.STRING, [1])),
        "input x is text, and torch",
    ),
    "a map for a graph": (
        _of_types(
            helper.make_sequence_type_proto(
                helper.make_map_type_proto(
                    TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, [])
                )
            )
        ),
        "input x is a map, and torch",
    ),
}


def _refused(path: Path) -> SourceError:
    with pytest.raises(SourceError) as caught:
        open_source(str(path), SourceConfig())
    error = caught.value
    assert error.exit_code == 2
    assert "m.onnx" in error.args[0]
    assert error.hint
    for text in (error.args[0], error.hint):
        assert text.isprintable()
        assert len(text) <= MAX_MESSAGE
    return error


@pytest.mark.parametrize("name", BAD_GRAPHS)
def test_a_bad_graph_is_refused_in_one_line(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    model, words = BAD_GRAPHS[name]
    written(tmp_path, model)
    monkeypatch.chdir(tmp_path)
    assert words in _refused(Path("m.onnx")).args[0]


def _far_away(folder: Path) -> None:
    (folder / "w.bin").write_bytes(ONES.tobytes())
    (folder.parent / "outside").write_bytes(ONES.tobytes())
    (folder / "link.bin").symlink_to("../outside")
    (folder / "zero.bin").symlink_to("/dev/zero")
    (folder / "loop").symlink_to("loop")
    (folder / "folder").mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe")


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (external("../outside"), "is outside its directory: ../outside"),
        (external("folder/../../outside"), "is outside its directory"),
        (external("/etc/passwd"), "is outside its directory: /etc/passwd"),
        (external("/dev/zero"), "is outside its directory: /dev/zero"),
        (external("link.bin"), "is outside its directory: link.bin"),
        (external("zero.bin"), "is outside its directory: zero.bin"),
        (external("loop"), "is in loop, which is not a path"),
        (external("a\0b"), r"is in a\x00b, which is not a path"),
        (external("a" * 100_000), "which is not a path"),
        (external(""), "no file is named"),
        (external(None), "no file is named"),
        (external("."), "is outside its directory: ."),
        (external("folder"), "is missing: folder"),
        (external("pipe"), "is missing: pipe"),
        (external("W.bin.data"), "is missing: W.bin.data"),
        (external("w.bin", -4), "cannot have the offset '-4'"),
        (external("w.bin", "abc"), "cannot have the offset 'abc'"),
        (external("w.bin", "9" * 5000), "cannot have the offset '999"),
        (external("w.bin", 0, 10**12), "lies outside its data (1,000,000,000,000 bytes from 0 of 64)"),
        (external("w.bin", 32), "lies outside its data (64 bytes from 32 of 64)"),
        (external("w.bin", 10**17), "lies outside its data"),
        (external("w.bin", 0, None, [2**31, 2**31]), "has the shape [2147483648, 2147483648]"),
        (external("w.bin", 0, None, [-1, 4]), "has the shape [-1, 4]"),
    ],
)
def test_external_data_is_only_read_beside_the_model(stored: Any, words: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    _far_away(folder)
    assert words in _refused(written(folder, model_of(PRODUCT, [stored]))).args[0]


def test_external_data_beside_the_model_is_read(tmp_path: Path) -> None:
    _far_away(tmp_path)
    path = written(tmp_path, model_of(PRODUCT, [external("./folder/../w.bin")]))
    assert torch.equal(OnnxModel(read_onnx(path)).w, torch.ones(4, 4))


def test_large_values_that_once_were_external_are_read(tmp_path: Path) -> None:
    """``onnx.load`` moves them into the tensor, with their location, the default, written after them."""
    onnx.save_model(
        model_of(PRODUCT, [initializer("w", np.ones((4, 2000), np.float32))]),
        tmp_path / "external.onnx",
        save_as_external_data=True,
        size_threshold=0,
    )
    path = written(tmp_path, onnx.load(tmp_path / "external.onnx"))
    assert torch.equal(OnnxModel(read_onnx(path)).w, torch.ones(4, 2000))


@pytest.mark.parametrize("make", [lambda p: os.mkfifo(p), lambda p: p.symlink_to("/dev/zero")])
def test_what_is_no_file_is_not_opened(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "m.onnx")
    assert "not a regular file" in _refused(tmp_path / "m.onnx").args[0]


def test_a_million_nodes_are_refused_soon(tmp_path: Path) -> None:
    one = node("Relu", ["x"], ["a"]).SerializeToString()
    path = written(tmp_path, b"\x08\x0a" + files._message(7, files._message(1, one) * 1_000_000))
    with soon():
        assert (
            _refused(path)
            .args[0]
            .endswith(f"has more than {MAX_NODES:,} nodes, or 3,000,000 nodes and values")
        )


def test_nodes_in_bodies_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PARSED_UNCOUNTED", 0)
    monkeypatch.setattr(files, "_MAX_FIELDS", 100)  # reading millions takes half a minute
    body = files._message(1, b"") * 101
    attribute = files._message(1, b"body") + files._message(6, body)
    loop = files._message(4, b"Loop") + files._message(5, attribute)
    path = written(tmp_path, b"\x08\x0a" + files._message(7, files._message(1, loop)))
    assert "nodes, attributes and names" in _refused(path).args[0]


def test_nodes_in_any_order_are_sorted(tmp_path: Path) -> None:
    nodes = [node("Relu", ["a"], ["y"]), node("Neg", ["x"], ["a"])]
    model = OnnxModel(read_onnx(written(tmp_path, model_of(nodes))))
    assert torch.equal(model(-torch.ones(2, 4))["y"], torch.ones(2, 4))


@pytest.mark.parametrize(
    ("nodes", "stored", "words"),
    [
        (
            PRODUCT,
            [initializer("w", np.ones((7, 4), np.float32))],
            "product (MatMul): mat1 and mat2 shapes cannot be multiplied (2x4 and 7x4) "
            "(its inputs: float32[2, 4], float32[7, 4])",
        ),
        (
            [node("Transpose", ["x"], ["y"], name="turn", perm=[0, 0])],
            [],
            "turn (Transpose): permute(): duplicate dims",
        ),
        (
            [node("Softmax", ["x"], ["y"], name="soft", axis=2**62)],
            [],
            "soft (Softmax): Dimension out of range",
        ),
        (
            [node("ConstantOfShape", ["s"], ["c"], name="fill"), node("Add", ["x", "c"], ["y"])],
            [initializer("s", np.array([-5]))],
            "fill (ConstantOfShape): ",
        ),
    ],
)
def test_an_error_inside_torch_names_its_node(nodes: Any, stored: Any, words: str, tmp_path: Path) -> None:
    path = written(tmp_path, model_of(nodes, stored))
    with pytest.raises(SourceError) as caught:
        ampaudit.scan(str(path))
    assert f"the node {words}" in caught.value.args[0]


@pytest.mark.parametrize("step", [1, 2])
def test_a_truncated_file_is_refused(step: int, tmp_path: Path) -> None:
    data = mlp().SerializeToString()
    accepted = []
    for end in range(step, len(data), 2):
        path = written(tmp_path, data[:end])
        try:
            OnnxModel(read_onnx(path))
        except SourceError:
            continue
        accepted.append(end)
    assert accepted == []


NAMES = ["forward", "training", "_parameters", "__class__", "eval", "_onnx", "inputs", "a..b", "..", "a/b c"]
NAMES += [
    "é.ü",
    "\n\x1b[31m",
    "a",
    "a.b",
    "a.b.c",
    "a_b",
    "a_b_",
    "forward_",
    "training.x",
    "x" * 300,
    "." * 50,
]
NAMES += ["a." * 3000 + "b", "::error::", "w@0", "w@1"]


def test_initializers_of_any_name_keep_their_values(tmp_path: Path) -> None:
    nodes = [
        node("Add", ["x" if i == 0 else f"s{i - 1}", name], [f"s{i}" if i < len(NAMES) - 1 else "y"])
        for i, name in enumerate(NAMES)
    ]
    stored = [initializer(name, np.full((2, 4), 2.0**i, np.float32)) for i, name in enumerate(NAMES)]
    model = OnnxModel(read_onnx(written(tmp_path, model_of(nodes, stored))))
    plain = torch.nn.Module()
    for name in ("forward", "training", "eval", "_parameters", "__class__"):
        assert type(getattr(model, name)) is not torch.nn.Parameter
        assert hasattr(plain, name)
    assert len(list(model.parameters())) == len(NAMES)
    assert model(torch.zeros(2, 4))["y"][0, 0] == 2.0 ** len(NAMES) - 1


def test_bodies_of_one_name_have_their_own_tensors(tmp_path: Path) -> None:
    def body(number: float) -> Any:
        constant = node("Constant", [], ["k"], value=helper.make_tensor("k", 1, [2], [number] * 2))
        return helper.make_graph([constant, node("Identity", ["k"], ["o"])], "same", [], [value("o")])

    nodes = [
        node("If", ["yes"], ["p"], then_branch=body(1), else_branch=body(2), name="if"),
        node("If", ["no"], ["q"], then_branch=body(3), else_branch=body(4), name="if"),
        node("Sub", ["p", "q"], ["y"]),
    ]
    stored = [initializer("yes", np.array(True)), initializer("no", np.array(False))]
    made = OnnxModel(read_onnx(written(tmp_path, model_of(nodes, stored))))
    assert sorted(p[0].item() for p in made.parameters()) == [1, 2, 3, 4]
    assert len({made._program.names.of(n) for n in made._program.file.nodes()}) == 11
