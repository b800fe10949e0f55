"""A conversion names the modules that it wrote although no batch ran them, and still checks their weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import safetensors.torch
from click.testing import CliRunner, Result

from ampaudit.cli.program import main

START = """import torch
from torch import nn

class Model(nn.Module):
"""
END = """
def get_model():
    torch.manual_seed(0)
    model = Model().eval()
    changed = model.get_parameter("{weight}")
    changed.data.view(-1)[0] = {value}
    return model

def example_inputs():
    return torch.ones(4, 8)
"""
VISION = """
    def __init__(self):
        super().__init__()
        self.text = nn.Linear(8, 8)
        self.vision = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x, pixels=None):
        made = self.text(x)
        return made if pixels is None else made + self.vision(pixels)
"""
EXPERTS = """
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, chosen=(0, 2)):
        return sum(self.experts[number](x) for number in chosen)
"""
BRANCH = """
    def __init__(self):
        super().__init__()
        self.inner, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x) if x.shape[0] < 100 else self.other(x)
"""
HEAD = """
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        made = self.inner(x)
        return self.head(made) if self.training else made
"""
WHOLE = """
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.inner(x))
"""
# a linear layer of m inputs and n outputs has (m + 1) * n parameters
CASES = [
    pytest.param(VISION, "vision", 280 / 352, "vision.0.weight", id="vision tower"),
    pytest.param(EXPERTS, "experts.1, experts.3", 0.5, "experts.3.weight", id="experts"),
    pytest.param(BRANCH, "other", 0.5, "other.weight", id="branch"),
    pytest.param(HEAD, "head", 27 / 99, "head.weight", id="training head"),
]


def convert(tmp_path: Path, model: str, weight: str, *words: str, value: float = 0.5) -> Result:
    """Type ``ampaudit convert`` with a model file."""
    path = tmp_path / "model.py"
    path.write_text(START + model + END.format(weight=weight, value=value))
    typed = ["convert", str(path), "-o", str(tmp_path / "out"), *words]
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, typed)


@pytest.mark.parametrize(("model", "names", "share", "weight"), CASES)
@pytest.mark.parametrize("policy", ["half", "torch-cuda"])
def test_modules_that_were_not_run_are_named_with_their_share(
    tmp_path: Path, model: str, names: str, share: float, weight: str, policy: str
) -> None:
    result = convert(tmp_path, model, weight, "--policy", policy)
    assert result.exit_code == 0, result.output
    line = f"unaudited  {names} ({share:.0%} of the weights): written, but never run: no input reaches it"
    assert line in result.stdout
    assert weight in safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")


@pytest.mark.parametrize(("model", "names", "share", "weight"), CASES)
def test_their_values_are_checked_all_the_same(
    tmp_path: Path, model: str, names: str, share: float, weight: str
) -> None:
    result = convert(tmp_path, model, weight, "--policy", "half", value=1e5)
    assert result.exit_code == 1
    assert f"{weight} holds 100,000; float16 ends at 65,504" in " ".join(result.stdout.split())
    assert not (tmp_path / "out").exists()


def test_a_weight_without_a_16_bit_copy_may_hold_any_value(tmp_path: Path) -> None:
    """As a policy that casts at each use leaves a layer that no input runs."""
    result = convert(tmp_path, BRANCH, "other.weight", "--policy", "torch-cuda", value=1e5)
    assert result.exit_code == 0
    stored = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")["other.weight"]
    assert stored.view(-1)[0] == 1e5


def test_json_has_the_gaps(tmp_path: Path) -> None:
    result = convert(tmp_path, HEAD, "head.weight", "--policy", "half", "--format", "json")
    (gap,) = json.loads(result.stdout)["gaps"]
    assert (gap["kind"], gap["op"]) == ("not run", "head (27% of the weights)")


def test_nothing_is_said_where_everything_ran(tmp_path: Path) -> None:
    result = convert(tmp_path, WHOLE, "head.weight", "--policy", "half")
    assert result.exit_code == 0
    assert not re.search("unaudited|never run", result.stdout)
