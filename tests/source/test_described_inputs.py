"""Models and inputs that the command line describes: ``file.py:Class --args 3,10 --input 8x3x32x32``."""

from __future__ import annotations

import subprocess
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from ampaudit.core.errors import UsageError
from ampaudit.source.python_file import described_batches, read_description
from tests.support.program import run_program

FILE = """\
import torch
from torch import nn
class Words(nn.Module):
    def __init__(self, size, width, act="relu"):
        super().__init__()
        self.table, self.out, self.act = nn.Embedding(size, width), nn.Linear(width, 2), act
    def forward(self, ids, mask, *, scale=None):
        made = self.out((self.table(ids) * mask[..., None]).mean(1))
        return made if scale is None else made * scale
class Other(nn.Linear): ...
model = Words(5, 8)
"""
GOOD = ("--args", "50,width=8", "--input", "2x7:int64@50", "--input", "mask=2x7:float32@0:1")


def run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "net.py").write_text(FILE)
    return run_program("scan", *words, cwd=tmp_path, environment={"COLUMNS": "300"})


def test_a_class_with_arguments_and_sizes(tmp_path: Path) -> None:
    done = run(tmp_path, "net.py:Words", *GOOD, "--input", "scale=1x1:float32@0.5:2", "--batches", "3")
    assert done.returncode == 0, done.stderr
    assert "3 batches of random inputs" in done.stdout
    assert "inputs: random inputs" in done.stdout
    stated = "input[0] 2x7 int64, 0 to 49; mask 2x7 float32, 0 to 1; scale 1x1 float32, 0.5 to 2"
    assert f"Inputs     {stated}" in done.stdout


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (
            ("net.py:Words", "--args", "50"),
            "missing a required argument: 'width'",
            "(size, width, act='relu')",
        ),
        (("net.py:Words", "--args", "1,2,3,4"), "too many positional arguments", "it takes (size, width"),
        (("net.py:Words", "--args", "50,relu"), "--args 50,relu: cannot be read", "quoted strings"),
        (("net.py:Words", "--args", "3)(4"), "cannot be read", "quoted strings"),
        (("net.py:Words", "--args", "50,width=8,width=9"), "cannot be read", "quoted strings"),
        (("net.py:Words", "--args", "**{'size': 50}"), "cannot be read", "quoted strings"),
        (("net.py:model", "--inputs", "data.npz"), "data.npz: not a file of inputs", "for ONNX, a .npz"),
        (("net.py:Words", "--args", "open('x','w')"), "cannot be read", "quoted strings"),
        (("net.py:model", "--args", "5,8"), "model is a model already, and takes no --args", ""),
        (("net.py",), "defines no model that can be built without arguments", "by its name: net.py:model"),
        (("net.py:Words", "--args", "5,8"), "has no example_inputs()", "--input 8x3x32x32"),
        (
            ("net.py:Words", "--args", "5,8", "--input", "2x7:int64"),
            "integers need a range",
            "2x7:int64@1000",
        ),
        (("net.py:Words", *GOOD[2:]), "missing a required argument", "--args"),
        (("net.py:Words", *GOOD, "--inputs", "net.py"), "both give inputs", "leave one out"),
        ((".", "--input", "2x7"), "--input is for models in Python", "--inputs FILE"),
    ],
)
def test_a_mistake_says_what_to_write(tmp_path: Path, words: tuple[str, ...], said: str, hint: str) -> None:
    (tmp_path / "data.npz").touch()
    done = run(tmp_path, *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert hint in done.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "0", "2x", "x2", "2x-1", "2xx2", "2 x 2", "-1", "a b=2", "=2", "1e3", "２x２"),
        *("2:float", "2:float8_e5m2", "2:complex64", "2:int64@", "2:int8@129", "2:int8@5:5", "2:uint8@-1:3"),
        *("2@1", "2@1:0", "2@nan:1", "2@0:inf", "2@0:1e39", "2:float16@0:70000", "2:bool@2", "99999x99999x9"),
    ],
)
def test_what_is_no_description_is_refused(text: str) -> None:
    if text == "0":
        assert read_description(text).sizes == (0,)
        return
    with pytest.raises(UsageError, match="--input"):
        read_description(text)


DTYPES = {
    "float16": st.floats(-60000, 60000), "float32": st.floats(-1e30, 1e30), "int64": st.integers(-99, 99),
    "uint8": st.integers(0, 255), "float64": st.floats(-1e200, 1e200),
}  # fmt: skip


@hypothesis.given(
    st.data(), st.sampled_from(sorted(DTYPES)), st.lists(st.integers(1, 9), min_size=1, max_size=4)
)
def test_values_are_of_the_stated_range(data: st.DataObject, dtype: str, sizes: list[int]) -> None:
    low, high = sorted((data.draw(DTYPES[dtype]), data.draw(DTYPES[dtype])))
    hypothesis.assume(low < high)
    words = "x".join(map(str, sizes))
    (batch,), info = described_batches([f"{words}:{dtype}@{low}:{high}"], 1, 0)
    (made,) = batch.args
    assert made.shape == torch.Size(sizes)
    assert str(made.dtype) == f"torch.{dtype}"
    limit = torch.tensor([low, high], dtype=torch.float64).to(made.dtype)
    assert bool((made >= limit[0]).all())
    assert bool((made <= limit[1]).all())
    assert made.is_floating_point() or bool((made < high).all())
    assert info.made_up == "random inputs"


def test_batches_differ_and_a_seed_repeats_them() -> None:
    batches, _ = described_batches(["4", "on=4:bool"], 2, 7)
    again, _ = described_batches(["4", "on=4:bool"], 2, 7)
    assert not torch.equal(batches[0].args[0], batches[1].args[0])
    assert torch.equal(batches[1].args[0], again[1].args[0])
    assert batches[0].kwargs["on"].dtype is torch.bool
    with pytest.raises(UsageError, match="twice"):
        described_batches(["a=4", "a=5"], 1, 0)


def test_a_module_of_the_current_directory_is_not_to_be_installed(tmp_path: Path) -> None:
    (tmp_path / "nets").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.py").write_text("from nets.small import Net\n")
    done = run(tmp_path, "models/mine.py")
    assert done.returncode == 2
    assert "nets is in the current directory: name the model as package.module:get_model" in done.stderr
