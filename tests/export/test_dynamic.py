"""Programs whose dimensions vary: for any of their sizes they compute what a conversion for it computes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ampaudit
from ampaudit.core.errors import AuditError, RunFailed, TraceFailed, UsageError
from ampaudit.export.dynamic import DynamicShapes
from ampaudit.source import Batch

SIZES = ((1, 1), (3, 19))


class Attention(nn.Module):
    """Sizes of its inputs are everywhere: in views, masks, positions and reductions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.norm = nn.Embedding(50, 16), nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.table(ids)
        heads = self.first(hidden).view(ids.shape[0], -1, 4, 4).transpose(1, 2)
        seen = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        hidden = self.norm(hidden + seen.transpose(1, 2).reshape(*ids.shape, 16)) * mask[..., None]
        hidden = hidden + torch.arange(ids.shape[1], device=ids.device)[None, :, None] / ids.shape[1] ** 0.5
        return {"hidden": hidden, "mean": hidden.mean(1)}


def batch(rows: int, length: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(rows * 100 + length)
    ids = torch.randint(0, 50, (rows, length), generator=made)
    return {"ids": ids, "mask": torch.rand(rows, length, generator=made)}


def model() -> nn.Module:
    torch.manual_seed(0)
    return Attention().eval()


NAMED = ("ids=rows,length", "mask=rows,length")


@pytest.mark.parametrize(("policy", "given"), [("ampaudit", (2, 6)), ("onnx", (1, 6))])
def test_every_size_gives_what_its_own_conversion_gives(
    tmp_path: Path, policy: str, given: tuple[int, int]
) -> None:
    _, made = ampaudit.convert(model(), batch(*given), tmp_path / "out", policy=policy, dynamic=NAMED)
    assert made is not None
    assert made.shapes is not None
    assert made.shapes.inputs == {"ids": ("rows", "length"), "mask": ("rows", "length")}
    assert len(made.shapes.verified) == 3
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    for index, sizes in enumerate(SIZES):
        _, fixed = ampaudit.convert(model(), batch(*sizes), tmp_path / str(index), policy=policy)
        assert fixed is not None
        assert fixed.shapes is not None
        assert fixed.shapes.ranges == {}
        expected = torch.export.load(tmp_path / str(index) / "model.pt2").module()(**batch(*sizes))
        found = program(**batch(*sizes))
        assert found.keys() == expected.keys() == {"hidden", "mean"}
        assert all(torch.equal(found[name], expected[name]) for name in found)


class Positions(nn.Module):
    """Reads as many rows of a weight as the input has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.table[: x.shape[1]].T


def test_a_weight_of_which_a_part_is_read_is_stored_in_16_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, x = Positions().eval(), torch.randn(2, 5, 16)
    ampaudit.convert(module, x, tmp_path / "out", policy="torch-cuda", dynamic=("x=rows,length,_",))
    assert load_file(tmp_path / "out" / "model.safetensors")["table"].dtype is torch.float16
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    for length in (3, 9):
        x = torch.randn(2, length, 16)
        assert torch.equal(program(x), x.half() @ module.table[:length].half().T)


def test_onnx_runtime_takes_other_lengths(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    output = tmp_path / "out"
    _, made = ampaudit.convert(model(), batch(2, 6), output, dynamic=NAMED, onnx=True)
    assert made is not None
    assert made.onnx_error is not None
    inputs = onnx.load(output / "model.onnx").graph.input
    axes = {given.name: [d.dim_param for d in given.type.tensor_type.shape.dim] for given in inputs}
    assert axes == {"ids": ["rows", "length"], "mask": ["rows", "length"]}
    session = runtime.InferenceSession(output / "model.onnx")
    for sizes in SIZES:
        found = session.run(None, {name: tensor.numpy() for name, tensor in batch(*sizes).items()})
        expected = model()(**batch(*sizes))
        for ours, theirs in zip(found, expected.values(), strict=True):
            assert torch.allclose(torch.from_numpy(ours).float(), theirs, atol=0.02)


def test_the_manifest_records_what_may_vary_and_verify_accepts_it(tmp_path: Path) -> None:
    given = ("ids=rows:1-8,length:3-40", "1=rows,length")
    ampaudit.convert(model(), batch(2, 6), tmp_path / "out", dynamic=given)
    shapes = json.loads((tmp_path / "out" / "manifest.json").read_text())["shapes"]
    assert shapes["ranges"] == {"rows": [1, 8], "length": [3, 40]}
    assert {"rows": 1, "length": 3} in shapes["verified"]
    assert ampaudit.verify(tmp_path / "out").exit_code == 0
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    with pytest.raises(Exception, match="40"):
        program(**batch(2, 41))


def test_without_dynamic_the_shapes_are_said_to_be_fixed(tmp_path: Path) -> None:
    _, made = ampaudit.convert(model(), batch(2, 6), tmp_path / "out")
    assert made is not None
    assert made.shapes is not None
    assert made.shapes.text.startswith("ids: 2 x 6, mask: 2 x 6 (fixed; --dynamic")


def test_inputs_inside_objects_are_refused_in_one_line(tmp_path: Path) -> None:
    model = nn.LSTM(4, 4)
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    with pytest.raises(AuditError, match="depends on values"):
        ampaudit.convert(model, (packed,), tmp_path / "out")


def test_a_hugging_face_directory(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        max_position_embeddings=24,
        vocab_size=99,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    given = ("input_ids=batch,seq", "attention_mask=batch,seq")
    tokens = {"input_ids": torch.ones(2, 8).long(), "attention_mask": torch.ones(2, 8).long()}
    _, made = ampaudit.convert(tmp_path / "bert", tokens, tmp_path / "out", dynamic=given)
    assert made is not None
    assert made.shapes is not None
    assert made.shapes.ranges == {"batch": (1, None), "seq": (1, 24)}
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    found = program(input_ids=torch.ones(4, 24).long(), attention_mask=torch.ones(4, 24).long())
    assert found["last_hidden_state"].shape == (4, 24, 16)


FIXED = {
    "a table": ("x + self.table", "x + self.table", "batch, seq, _"),
    "an int": ("x * int(x.shape[1])", "int(x.shape[1])", "_, seq, _"),
    "a list": ("x * torch.tensor([1.0 * i for i in range(x.shape[1])])[:, None]", "range(", "_, seq, _"),
}


@pytest.mark.parametrize("name", FIXED)
def test_a_dimension_that_the_model_fixes_names_the_line(
    model_file: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    code, words, axes = FIXED[name]
    path = model_file(
        "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.first, self.table = nn.Linear(4, 4), nn.Parameter(torch.zeros(6, 4))\n"
        f"    def forward(self, x):\n        x = self.first(x)\n        return {code}\n"
        "def example_inputs():\n    return torch.randn(2, 6, 4)\n"
    )
    with pytest.raises(TraceFailed, match=r"model\.py:9: the dimension 'seq' cannot vary") as caught:
        ampaudit.convert(path, None, tmp_path / "out", dynamic=[f"x={axes}"])
    assert "fixes it to 6" in str(caught.value)
    assert words in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_sizes_that_an_image_model_excludes_are_named_and_a_range_helps(tmp_path: Path) -> None:
    images = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1))
    with pytest.raises(TraceFailed, match=r"not every height satisfies \(1 \+ .*height.* != 1"):
        ampaudit.convert(images, torch.randn(2, 3, 8, 8), tmp_path / "out", dynamic=["0=_,_,height,_"])
    given = ["0=rows,_,height:3-,_"]
    _, made = ampaudit.convert(images, torch.randn(1, 3, 8, 8), tmp_path / "out", dynamic=given)
    assert made is not None
    assert made.shapes is not None
    assert {"rows": 1, "height": 3} in made.shapes.verified


def test_a_size_at_which_the_model_fails_asks_for_a_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions: torch.Tensor = self.table(torch.arange(x.shape[1]))
            return x + positions

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the audit is kept
    with pytest.raises(RunFailed, match="the model itself fails at seq 17: ") as caught:
        ampaudit.convert(Positions(), torch.randn(2, 8, 4), tmp_path / "out", dynamic=["x=_,seq,_"])
    assert "LOW-HIGH" in caught.value.hint
    _, made = ampaudit.convert(
        Positions(), torch.randn(2, 8, 4), tmp_path / "out", dynamic=["x=_,seq:1-10,_"]
    )
    assert made is not None


class Centered(nn.Module):
    """Computes something else where a dimension is 1."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.first, self.axis = nn.Linear(4, 4), axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x)
        return y - y.mean(self.axis, keepdim=True) if x.shape[self.axis] > 1 else y * 3


@pytest.mark.parametrize("low", [0, 1])
def test_a_size_of_1_that_was_asked_for_must_be_right(
    tmp_path: Path, low: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the audit is kept
    given = [f"x=n:{low}-8,_"]
    with pytest.raises(RunFailed, match="not the same op for other shapes"):
        ampaudit.convert(Centered(0).eval(), torch.randn(4, 4), tmp_path / "out", dynamic=given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rows", ["b", "b:2-8", "b:1-8"])
def test_a_range_of_one_dimension_asks_nothing_of_another(tmp_path: Path, rows: str) -> None:
    given = [f"x={rows},t,_"]
    _, made = ampaudit.convert(Centered(1).eval(), torch.randn(4, 4, 4), tmp_path / "out", dynamic=given)
    assert made is not None
    assert made.shapes is not None
    assert made.shapes.ranges["t"] == (2, None)
    minimum = made.shapes.ranges["b"][0]
    assert minimum == (1 if rows == "b:1-8" else 2)
    assert made.shapes.verified.count({"b": minimum, "t": 2}) == 1


def test_a_size_of_1_counts_only_where_it_was_verified(tmp_path: Path) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(4, 4)
    shapes = DynamicShapes.parse(["0=n:1-8,_"], layer, Batch((x,)))
    program = torch.export.export(layer, (x,), dynamic_shapes=shapes.dimensions(), strict=False)
    assert shapes.describe(program, ()).ranges == {"n": (2, 8)}
    assert shapes.describe(program, [{"n": 1}]).ranges == {"n": (1, 8)}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["idz=rows,length"], "did you mean 'ids'"),
        (["ids"], "INPUT=DIM"),
        (["ids=rows"], r"2 dimensions \(2, 6\)"),
        (["ids=rows,1x"], "not a name for a dimension"),
        (["ids=same,same"], "same is 2 in ids and 6 in ids"),
        (["ids=rows:9-3,length"], "range of rows is empty"),
        (["ids=rows:0-0,length"], "range of rows is empty"),
        (["ids=rows:2-2,length"], "range of rows is one size"),
        (["ids=rows:0-1,length"], "range of rows is one size"),
        (["ids=n:1-6,_", "mask=n:2-6,_"], "n has two ranges"),
        (["ids=rows:3-9,length"], "rows is 2 in ids, out of its range"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_audit(
    tmp_path: Path, given: list[str], words: str
) -> None:
    told: list[str] = []
    with pytest.raises(UsageError, match=words):
        ampaudit.convert(
            model(),
            batch(2, 6),
            tmp_path / "out",
            dynamic=given,
            session=ampaudit.Session(on_progress=lambda phase, *_: told.append(phase)),
        )
    assert told == []


def test_weights_alone_have_no_dimensions(tmp_path: Path) -> None:
    from ampaudit.export.config import ConvertConfig

    with pytest.raises(AuditError, match="needs the program"):
        ConvertConfig(dynamic=NAMED, program=False).check_output(tmp_path / "out")


def test_the_other_sizes_are_a_larger_one_and_half_of_it() -> None:
    given = Batch((torch.zeros(4, 6),))
    shapes = DynamicShapes.parse(["0=rows,length"], nn.Linear(6, 6), given)
    others, minimum = shapes.other_sizes(given, {"rows": (1, None), "length": (4, 8)})
    assert others == [{"rows": 9, "length": 7}, {"rows": 2, "length": 5}]
    assert minimum == {"rows": 1, "length": 4}


class Size(NamedTuple):
    height: int
    width: int


# torch saves neither enums nor named tuples, nor keys that are tuples
UNSAVED = [StrEnum("Owner", ["user"])("user"), Size(2, 3), {"sizes": [Size(2, 3)]}, {(2, 3): 1}]


@pytest.mark.parametrize("owner", UNSAVED, ids=repr)
@pytest.mark.parametrize("dynamic", [(), ("x=rows,_",)])
def test_a_program_is_called_with_the_keywords_of_the_model(
    tmp_path: Path, dynamic: tuple[str, ...], owner: object
) -> None:
    class Video(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(
            self, x: torch.Tensor, *, frames: int, mode: str, mask: None, owner: object
        ) -> torch.Tensor:
            return self.layer(x) * frames if mode == "a" and mask is None and owner else x

    model, x = Video().eval(), torch.randn(3, 4)
    keywords = {"x": x, "frames": 3, "mode": "a", "mask": None}
    ampaudit.convert(model, keywords | {"owner": owner}, tmp_path / "out", policy="half", dynamic=dynamic)
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    half = copy.deepcopy(model).half()
    assert torch.equal(program(**keywords), half(**keywords | {"x": x.half(), "owner": model}))
    with pytest.raises(Exception, match="frames"):  # another constant than the program was made with
        program(**keywords | {"frames": 2})
