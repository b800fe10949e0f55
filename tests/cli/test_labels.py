"""What commands call things: weights, files, models, packages, rates, paths."""

from __future__ import annotations

import csv
import io
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.core.errors import OutputError, UsageError
from ampaudit.core.files import write_text
from ampaudit.report.extrapolation import Tail
from ampaudit.views.scan_tables import summary_rows
from tests.support.program import run_program
from tests.support.saved import saved_report

MODEL = "import torch\nfrom torch import nn\ndef get_model():\n    return {made}\n"
INPUTS = "def example_inputs():\n    return torch.ones(2, 8)\n"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return run_program(*words, environment={"COLUMNS": "300"})


@pytest.mark.parametrize(
    ("made", "policy", "fp32", "low"),
    [
        ("nn.Linear(8, 8)", "half", 288, 144),
        ("nn.Linear(8, 8).half()", "as-is", 0, 144),
        ("nn.Linear(8, 8).bfloat16()", "as-is", 0, 144),
        ("nn.Linear(8, 8)", "as-is", 288, 0),
        ("nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).half())[1]", "as-is", 0, 144),
    ],
)
def test_bytes_of_weights_are_those_of_their_dtype(
    tmp_path: Path, made: str, policy: str, fp32: int, low: int
) -> None:
    dtype = "bfloat16" if "bfloat16" in made else "float16"
    inputs = (
        INPUTS.replace("8)", f"8, dtype=torch.{dtype})") if policy == "as-is" and "()" in made else INPUTS
    )
    (tmp_path / "model.py").write_text(MODEL.format(made=made) + inputs)
    found = run("scan", str(tmp_path / "model.py"), "--policy", policy, "--dtype", dtype)
    copies = "in 16 bits" if policy == "as-is" else "of 16-bit copies"
    assert f"Weights    {fp32} B in FP32, {low} B {copies}" in found.stdout, found.stderr


def test_fp32_is_said_to_have_the_weights_that_a_model_came_with(tmp_path: Path) -> None:
    inputs = "def example_inputs():\n    return torch.rand(2, 8, dtype=torch.float16)\n"
    (tmp_path / "model.py").write_text(MODEL.format(made="nn.Linear(8, 8).half()") + inputs)
    model = str(tmp_path / "model.py")
    assert "dB against FP32 with the same weights" in run("scan", model, "--policy", "as-is").stdout
    (tmp_path / "model.py").write_text(MODEL.format(made="nn.Linear(8, 8)") + INPUTS.replace("ones", "rand"))
    assert "dB against FP32;" in run("scan", model, "--policy", "half").stdout


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("value", "needs"),
    [
        (Whole(), "tests.cli.test_labels.Whole"),
        (nn.Sequential(nn.Linear(2, 2)), "torch.nn.modules.container.Sequential"),
        ({"model": Whole()}, "tests.cli.test_labels.Whole"),
        ({"weight": torch.ones(2)}, None),
        (Whole().state_dict(), None),
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_a_pickled_module_is_not_called_weights(
    tmp_path: Path, value: object, needs: str | None, suffix: str
) -> None:
    path = tmp_path / f"whole{suffix}"
    torch.save(value, path)
    found = run("scan", str(path))
    assert found.returncode == 2
    if needs is None:
        assert "holds weights, not a model" in found.stderr
    else:
        assert f"its pickle needs {needs}, which would run code" in found.stderr
        assert "holds weights" not in found.stderr


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        ({"SmallCNN": "width, depth"}, "without arguments (SmallCNN needs width, depth)"),
        ({"A": "n", "B": "n, m=1"}, "without arguments (A needs n; B needs n)"),
        ({"A": "", "B": "n=1"}, "defines several models (A, B)"),
        ({}, "defines no get_model() and no nn.Module class"),
    ],
)
def test_a_file_without_a_model_says_what_it_has(tmp_path: Path, classes: dict[str, str], said: str) -> None:
    path = tmp_path / "model.py"
    bodies = (
        f"class {name}(nn.Module):\n    def __init__(self, {needs}):\n        super().__init__()\n"
        for name, needs in classes.items()
    )
    path.write_text("import torch\nfrom torch import nn\n" + "".join(bodies))
    found = run("scan", str(path))
    assert said in found.stderr
    last = next(reversed(classes), "Module")  # which may contain the others
    assert f"get_model(): return {last}(...)" in found.stderr


def test_a_model_that_is_made_already_can_be_scanned_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("from torch import nn\nbody = nn.Linear(4, 4)\nmodel = nn.Sequential(body)\n")
    unnamed = run("scan", str(path), "--input", "2x4")
    assert unnamed.returncode == 2
    assert f"get_model(): return model, or scan it by its name: {path}:model" in unnamed.stderr
    assert run("scan", f"{path}:model", "--input", "2x4").returncode == 0


@pytest.mark.parametrize("folders", [("pkg",), ("outer", "inner"), ("a", "b", "c")])
@pytest.mark.parametrize(("marked", "factory"), [(True, "get_model"), (False, "build")])
def test_a_file_that_imports_relatively_is_named_as_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folders: tuple[str, ...], marked: bool, factory: str
) -> None:
    if not marked:
        folders = folders[-1:]
    folder = tmp_path.joinpath(*folders)
    folder.mkdir(parents=True)
    for depth in range(len(folders)) if marked else ():
        tmp_path.joinpath(*folders[: depth + 1], "__init__.py").touch()
    (folder / "blocks.py").write_text("from torch import nn\nblock = nn.Linear(8, 8)\n")
    code = f"import torch\nfrom .blocks import block\ndef {factory}():\n    return block\n{INPUTS}"
    (folder / "audit.py").write_text(code)
    found = run("scan", str(folder / "audit.py") + (":build" if factory == "build" else ""))
    hint = re.search(r"ampaudit scan (\S+), in the directory (\S+)", found.stderr)
    assert hint is not None, found.stderr
    assert hint[1] == ".".join((*folders, "audit")) + f":{factory}"
    monkeypatch.chdir(hint[2])
    followed = run("scan", hint[1], "--policy", "half")
    assert followed.returncode == 0, followed.stderr


@pytest.mark.parametrize(
    ("per_million", "high", "said"),
    [
        (0.0, 1.18e-208, "0 (90 %: 0 to under 0.001, from 8 batches)"),
        (1e-5, 0.5, "under 0.001 (90 %: 0 to 0.5, from 8 batches)"),
        (12.0, 340.0, "12 (90 %: 0 to 340, from 8 batches)"),
    ],
)
def test_rates_that_are_next_to_nothing_are_said_to_be(per_million: float, high: float, said: str) -> None:
    report = saved_report()
    tail = Tail(report.sites[0].site, per_million, 0.0, high, 8, 8)
    rows = dict(summary_rows(replace(report, tails=(tail,)), 0))
    assert rows["Tail"].endswith(said)


def test_paths_below_the_working_folder_are_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\nfrom torch import nn\nclass Model(nn.Module):\n    def forward(self, x):\n"
        "        return x * 9e4\n" + INPUTS
    )
    for command in ("scan", "check"):
        for form in ("text", "csv", "junit") if command == "check" else ("csv",):
            found = run(command, str(model), "--policy", "half", "--format", form)
            text = found.stdout.replace(f'name="{model}', "").replace(f'classname="{model}', "")
            assert str(tmp_path) not in text, (command, form)
        rows = list(csv.DictReader(io.StringIO(run(command, str(model), "--format", "csv").stdout)))
        assert {row["target" if command == "check" else "file"] for row in rows} == {"model.py"}


def test_python_is_told_of_its_own_way_to_replace_a_file(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_text(path, "first", force=False)
    with pytest.raises(OutputError) as raised:
        write_text(path, "second", force=False)
    assert "in Python: force=True" in str(raised.value.hint)
    write_text(path, "third", force=True)
    assert path.read_text() == "third"


@pytest.mark.parametrize("value", [-1.0, -0.001, float("-inf")])
def test_an_accuracy_below_zero_is_refused(value: float) -> None:
    with pytest.raises(UsageError, match="min_sqnr"):
        ampaudit.scan(nn.Linear(8, 8), torch.ones(2, 8), min_sqnr=value)
    assert run("scan", "model.py", "--min-sqnr", str(value)).returncode == 2
