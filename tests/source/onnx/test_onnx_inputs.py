from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result
from onnx import TensorProto

import ampaudit
from ampaudit.cli.program import main
from ampaudit.core.errors import AuditError, InputError, UsageError
from ampaudit.core.source_config import SourceConfig
from ampaudit.source.interface import ModelSource
from ampaudit.source.open import open_source
from tests.support.onnx_graphs import initializer, mlp, model_of, node, value, written

INT64 = TensorProto.INT64


def _language_model() -> Any:
    """Embeddings of tokens and positions under a mask."""
    table = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)
    nodes = [
        node("Gather", ["table", "input_ids"], ["e"], name="/embed/Gather"),
        node("Cast", ["position_ids"], ["p"], to=INT64),
        node("Gather", ["places", "p"], ["f"]),
        node("Add", ["e", "f"], ["h"]),
        node("Cast", ["attention_mask"], ["m"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["m", "axes"], ["n"]),
        node("Mul", ["h", "n"], ["q"]),
        node("Mul", ["q", "scale"], ["y"]),
    ]
    stored = [
        initializer("table", table),
        initializer("places", table[:5]),
        initializer("axes", np.array([2])),
    ]
    names = ("input_ids", "position_ids", "attention_mask")
    inputs = [value(name, "batch", "sequence", dtype=INT64) for name in names]
    return model_of(nodes, stored, [*inputs, value("scale", "batch", 1, 4)])


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def _opened(path: Path, **options: Any) -> ModelSource:
    return open_source(str(path), SourceConfig(**options))


def test_inputs_are_made_from_the_types_of_the_graph(tmp_path: Path) -> None:
    path = written(tmp_path, _language_model())
    source = _opened(path, batches=20)
    assert len(source.batches) == 20
    for batch in source.batches:
        ids = batch.kwargs["input_ids"]
        assert (ids.shape, ids.dtype) == ((1, 16), torch.int64)
        assert torch.equal(batch.kwargs["attention_mask"], torch.ones(1, 16, dtype=torch.int64))
        assert torch.equal(batch.kwargs["position_ids"], torch.arange(16)[None] % 5)
        assert batch.kwargs["scale"].shape == (1, 1, 4)
    seen = torch.cat([batch.kwargs["input_ids"] for batch in source.batches])
    assert sorted(set(seen.flatten().tolist())) == list(range(7))
    again = _opened(path, batches=1, seed=1).batches[0].kwargs["scale"]
    assert not torch.equal(again, source.batches[0].kwargs["scale"])
    assert source.inputs.origin == "random"


def test_made_inputs_are_declared_in_every_format(tmp_path: Path) -> None:
    path = written(tmp_path, mlp())
    for form in ("text", "json", "markdown", "html", "sarif", "junit", "github"):
        done = run("scan", str(path), "--format", form)
        assert done.exit_code == 0, done.output
        if form == "json":
            assert json.loads(done.stdout)["run"]["inputs"]["origin"] == "random"
        else:
            assert re.search(r"random\s+inputs", done.stdout), form


def test_axes_that_the_graph_names_can_be_swept(tmp_path: Path) -> None:
    source = _opened(written(tmp_path, _language_model()))
    assert source.make_batches is not None
    (batch,) = source.make_batches({"sequence": 3, "batch": 2})
    assert batch.kwargs["input_ids"].shape == (2, 3)
    with pytest.raises(UsageError, match="no axis 'length'") as caught:
        source.make_batches({"length": 3})
    assert caught.value.hint == "axes of these inputs: batch, sequence"


def test_sums_of_axes_are_sums(tmp_path: Path) -> None:
    inputs = [value("x", "batch", "past"), value("z", "batch", "past + 1")]
    source = _opened(written(tmp_path, model_of([node("Concat", ["x", "z"], ["y"], axis=1)], (), inputs)))
    assert source.batches[0].kwargs["z"].shape == (1, 17)


def test_inputs_are_read_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, mlp())
    x = torch.randn(3, 8)
    np.savez(tmp_path / "x.npz", x=x.numpy())
    np.savez_compressed(tmp_path / "packed.npz", x=x.numpy())
    safetensors.torch.save_file({"x": x}, tmp_path / "x.safetensors")
    safetensors.torch.save_file({"input[0]": x}, tmp_path / "place.safetensors")
    (tmp_path / "x.py").write_text(
        f"import torch\nx = torch.tensor({x.tolist()})\ndef example_inputs(): return x\n"
    )
    (tmp_path / "n.py").write_text("import x\ndef example_inputs(): return {'x': x.x}\n")
    for name in ("x.npz", "packed.npz", "x.safetensors", "place.safetensors", "x.py", "n.py"):
        source = _opened(path, inputs=tmp_path / name)
        (batch,) = source.batches
        assert torch.equal([*batch.args, *batch.kwargs.values()][0], x), name
        assert source.inputs.origin == "given"
    report = ampaudit.scan(str(path), inputs={"x": x})
    assert report.run.batches == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "holds nothing"),
        ({"z": torch.ones(1, 8)}, "holds z"),
        ({"x": torch.ones(1, 8), "z": torch.ones(1)}, "holds x, z"),
        ({"x": torch.ones(1, 8, dtype=torch.float64)}, "x is float64"),
        ({"x": torch.ones(1, 7)}, "x has the sizes [1, 7]"),
        ({"x": torch.ones(8)}, "x has the sizes [8]"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(given: Any, words: str, tmp_path: Path) -> None:
    path = written(tmp_path, mlp())
    safetensors.torch.save_file(given, tmp_path / "x.safetensors")
    np.savez(tmp_path / "x.npz", **{name: tensor.numpy() for name, tensor in given.items()})
    for name in ("x.safetensors", "x.npz"):
        with pytest.raises(InputError) as caught:
            _opened(path, inputs=tmp_path / name)
        assert words in caught.value.args[0]
        assert "the graph takes x float32[batch, 8]" in caught.value.hint


def test_axes_of_one_name_have_one_size(tmp_path: Path) -> None:
    path = written(tmp_path, _language_model())
    given = {name: torch.ones(1, 16, dtype=torch.int64) for name in ("input_ids", "position_ids")}
    given |= {"attention_mask": torch.ones(1, 15, dtype=torch.int64), "scale": torch.ones(1, 1, 4)}
    safetensors.torch.save_file(given, tmp_path / "x.safetensors")
    with pytest.raises(InputError, match=re.escape("attention_mask has the sizes [1, 15]")):
        _opened(path, inputs=tmp_path / "x.safetensors")


def test_a_wrong_call_from_python_says_what_the_graph_takes(tmp_path: Path) -> None:
    path = written(tmp_path, mlp())
    with pytest.raises(AuditError, match="the graph takes x; given: z"):
        ampaudit.scan(str(path), inputs={"z": torch.ones(1, 8)})


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x93NUMPY", b"PK\x05\x06" + b"\0" * 18])
def test_a_broken_npz_is_refused(data: bytes, tmp_path: Path) -> None:
    path = written(tmp_path, mlp())
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(InputError, match=r"cannot be read|holds nothing"):
        _opened(path, inputs=tmp_path / "x.npz")


def test_pickles_in_an_npz_are_not_read(tmp_path: Path) -> None:
    path = written(tmp_path, mlp())
    np.savez(tmp_path / "x.npz", x=np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="cannot be read: Object arrays"):
        _opened(path, inputs=tmp_path / "x.npz")


def test_gradients_need_only_a_loss(tmp_path: Path) -> None:
    path = written(tmp_path, mlp())
    (tmp_path / "x.py").write_text(
        "import torch\ndef example_inputs(): return torch.ones(2, 8)\n"
        "def loss(output): return output['y'].mean()\n"
    )
    done = run("scan", str(path), "--inputs", str(tmp_path / "x.py"), "--backward", "--format", "json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["backward"]


def test_streaming_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--stream: .*is memory-mapped"):
        _opened(written(tmp_path, mlp()), stream=True)


def test_other_weights_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, mlp())
    with pytest.raises(UsageError, match=r"--weights: .*contains its weights"):
        _opened(path, weights=path)


def test_without_onnx_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, mlp())
    for name in [name for name in sys.modules if name.startswith("ampaudit.source.onnx.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    with pytest.raises(AuditError, match="needs the package onnx_ir") as caught:
        _opened(path)
    assert caught.value.hint == "pip install 'ampaudit[onnx]'"
