"""A new instrument is one folder and one line: terminal, HTML, JSON, CSV, merge and three ranks have it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.paths import ROOT

MODEL = """
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        first, second = (self.scale(x) * 1e-5).split(4, 1)
        return self.shift(torch.cat((first, second), 1))

def get_model():
    torch.manual_seed(0)
    return Small()

def batches():
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(4, 8, generator=draw) for _ in range(4)]
"""
SCAN = ("scan", "model.py", "--subnormals", "--policy", "half", "--batches", "4", "--fail-on", "never")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model beside a copy of the package with the instrument in it."""
    root = tmp_path_factory.mktemp("copy")
    package = root / "ampaudit"
    shutil.copytree(ROOT / "ampaudit", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "rules", root / "rules")
    shutil.copytree(Path(__file__).parent / "subnormals", package / "instruments" / "subnormals")
    registry = package / "instruments" / "__init__.py"
    registry.write_text(registry.read_text().replace("NAMES = (", 'NAMES = ("subnormals", ', 1))
    work = root / "work"  # apart from the package, which would count as code of the model
    work.mkdir()
    (work / "model.py").write_text(MODEL)
    return work


def run(folder: Path, *words: str, how: tuple[str, ...] = (), code: int = 0) -> str:
    """Run the copy's command; return what it prints, on stderr if it fails as expected."""
    command = [sys.executable, *how, "-m", "ampaudit", *words]
    environment = os.environ | {"PYTHONPATH": str(folder.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


def section(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())["sections"]["subnormals"]


@pytest.fixture(scope="module")
def counts(folder: Path) -> dict[str, int]:
    """The section of a scan by one process."""
    run(folder, *SCAN, "-o", "alone.json")
    return section(folder, "alone.json")["layers"]


def test_the_counts_are_those_of_torch(counts: dict[str, int]) -> None:
    space: dict[str, Any] = {}
    exec(MODEL, space)
    model = space["get_model"]().half()
    products = [model.scale(batch.half()) * 1e-5 for batch in space["batches"]()]
    small = sum(
        int(((x != 0) & (x.abs() < torch.finfo(torch.float16).smallest_normal)).sum()) for x in products
    )
    assert small > 50
    # the product, its halves, and both together; a product on the edge may round the other way
    assert counts[""] == pytest.approx(3 * small, abs=9)
    assert counts.keys() == {""}


def test_every_format_shows_it(folder: Path, counts: dict[str, int]) -> None:
    run(folder, *SCAN, "-o", "alone.html")
    for text in (run(folder, "report", "alone.json"), (folder / "alone.html").read_text()):
        assert "Subnormal values" in text
        assert f"{counts['']:,}" in text


def test_parts_are_merged(folder: Path, counts: dict[str, int]) -> None:
    for part in (1, 2):
        run(folder, *SCAN, "--part", f"{part}/2", "-o", f"part-{part}.json")
    run(folder, "merge", "part-1.json", "part-2.json", "-o", "merged.json")
    assert section(folder, "merged.json")["layers"] == counts


def test_all_steps_are_counted(folder: Path, counts: dict[str, int]) -> None:
    run(folder, *SCAN, "--steps", "2", "-o", "steps.json")
    assert section(folder, "steps.json")["layers"][""] > counts[""]


def test_three_ranks_count_the_same(folder: Path, counts: dict[str, int]) -> None:
    how = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    run(folder, *SCAN, "-o", "ranks.json", how=how)
    assert section(folder, "ranks.json")["layers"] == counts


def test_its_needs_exclude_other_options(folder: Path) -> None:
    said = run(folder, *SCAN, "--ranges", code=2)
    assert "--ranges cannot be combined with --subnormals, which needs a 16-bit side" in said
