"""Paths of the command line keep their meaning if a model file changes the working directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ampaudit
from ampaudit.cli.program import main

MODEL = """
import os
from pathlib import Path
import torch
from torch import nn
os.chdir(os.path.join(os.path.dirname(__file__), "run"))
def get_model():
    model = nn.Linear(4, 4)
    model.load_state_dict(torch.load("weights.pt"))
    os.chdir("..")
    return model
def example_inputs():
    return torch.full((2, 4), float(Path("run/scale.txt").read_text()))
def loss(output, batch):
    return output.square().mean()
"""
OUTPUTS = {
    "scan": ("-o", "out.json"),
    "scan --weights other.pt": ("-o", "out.json"),
    "plan": ("-o", "out.json"),
    "train --steps 2": ("-o", "out.json", "--plot", "out.svg"),
    "tune": ("-o", "out.yaml", "--plot", "out.svg"),
    "bench --modes fp32": ("-o", "out.json"),
    "convert": ("-o", "out"),
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model file below it, in which commands are started."""
    run = tmp_path / "project" / "run"
    run.mkdir(parents=True)
    (run.parent / "model.py").write_text(MODEL)
    (run / "scale.txt").write_text("0.5")
    torch.save(nn.Linear(4, 4).state_dict(), run / "weights.pt")
    torch.save(nn.Linear(4, 4).state_dict(), tmp_path / "other.pt")
    monkeypatch.chdir(tmp_path)
    for name in ("project", "project.model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("command", OUTPUTS)
@pytest.mark.parametrize("model", ["project/model.py", "project.model:get_model"])
def test_outputs_are_written_where_the_command_was_started(project: Path, command: str, model: str) -> None:
    name, *options = command.split()
    before = {*(project / "project").rglob("*")}
    done = CliRunner().invoke(main, [name, model, *options, *OUTPUTS[command]], catch_exceptions=False)
    assert done.exit_code in (0, 1), done.output
    for output in OUTPUTS[command][1::2]:
        assert (project / output).exists()
    assert Path.cwd() == project
    left = {*(project / "project").rglob("*")} - before
    assert {path.suffix for path in left} <= {"", ".pyc"}


def test_each_file_begins_where_the_command_was_started(project: Path) -> None:
    (project / "inputs.py").write_text(
        "import os, torch\nBEGAN = os.getcwd()\ndef example_inputs(): return torch.ones(len(BEGAN), 4)\n"
    )
    source = ampaudit.SourceConfig(inputs=Path("inputs.py"))
    for _ in range(2):
        report = ampaudit.scan("project/model.py", source=source)
        assert report.sites[0].shape == (len(os.fspath(project)), 4)


def test_a_working_directory_may_disappear(project: Path) -> None:
    lines = "import os, tempfile\nwith tempfile.TemporaryDirectory() as folder: os.chdir(folder)\n"
    rest = "from torch import nn, ones\ndef get_model(): return nn.Linear(4, 4)\n"
    (project / "gone.py").write_text(f"{lines}{rest}def example_inputs(): return ones(2, 4)\n")
    done = CliRunner().invoke(main, ["scan", "gone.py", "-o", "out.json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert (project / "out.json").is_file()
