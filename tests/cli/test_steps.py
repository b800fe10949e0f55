"""``ampaudit scan --steps``: what it prints, and what it refuses before anything is imported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ampaudit.cli.program import main
from ampaudit.core.errors import AuditError

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)
        nn.init.eye_(self.inner.weight)

    def forward(self, state):
        return self.inner(state) * 2.0


def next_inputs(outputs, inputs):
    return outputs + 0.0


def example_inputs():
    return torch.ones(2, 4)
"""


def invoke(*words: str) -> Result:
    """Run a command."""
    return CliRunner().invoke(main, words)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model whose state doubles with each step."""
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return str(path)


def test_the_report_names_the_step_in_each_format(model: str, tmp_path: Path) -> None:
    base = ("scan", model, "--steps", "20", "--policy", "half")
    shown = invoke(*base)
    assert shown.exit_code == 1
    assert "first at step 16" in shown.output
    assert "doubles every 1 steps" in shown.output
    for suffix in ("html", "md", "json"):
        path = tmp_path / f"report.{suffix}"
        assert invoke(*base, "-o", str(path)).exit_code == 1
        text = path.read_text(encoding="utf-8")
        assert "step 16" in text or json.loads(text)["findings"][0]["evidence"]["step"] == 16
    steps = json.loads((tmp_path / "report.json").read_text())["steps"]
    assert [row["step"] for row in steps["steps"]] == list(range(1, 21))
    assert [row["step"] for row in steps["steps"] if row["poisoned"]] == [17, 18, 19, 20]
    assert "The first step out of range is 16" in (tmp_path / "report.html").read_text(encoding="utf-8")
    again = invoke("report", str(tmp_path / "report.json"))
    assert "first at step 16" in again.output


@pytest.mark.parametrize("option", ["--static", "--ranges", "--prove", "--backward", "--assume=input=0:1"])
def test_options_without_sense_are_refused_before_the_import(option: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("raise SystemExit('imported')")
    found = invoke("scan", str(path), "--steps", "3", option)
    assert isinstance(found.exception, AuditError)
    assert found.exception.exit_code == 2
    names = f"(--steps|{option.partition('=')[0]})"
    assert re.search(f"{names} cannot be combined with {names},", str(found.exception))


@pytest.mark.parametrize("count", ["0", "-1", "1.5", "many"])
def test_a_bad_number_of_steps_is_refused(count: str, model: str) -> None:
    assert invoke("scan", model, "--steps", count).exit_code == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("return None", "returned nothing after step 1"),
        ("return outputs[0, 0].item()", "returned float after step 1"),
        ("raise ValueError('no more')", "ValueError: no more"),
        ("return outputs * float('nan')", "NaN or infinity in FP32 after step 1"),
    ],
)
def test_a_bad_function_ends_with_one_line(line: str, words: str, model: str) -> None:
    Path(model).write_text(MODEL.replace("return outputs + 0.0", line))
    found = invoke("scan", model, "--steps", "3")
    assert isinstance(found.exception, AuditError)
    assert found.exception.exit_code == (3 if "nan" in line else 2)
    assert words in str(found.exception)
