"""A scan does not import the libraries that lint needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODEL = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x @ x.T

def example_inputs():
    return torch.full((2, 4), 1000.0)
"""
SCAN = """
import sys
from ampaudit.cli.program import main

try:
    main(["scan", "model.py", "--policy", "half"], standalone_mode=False)
except SystemExit:
    pass
print("imported", *sorted({"libcst", "re2", "torch"} & sys.modules.keys()))
"""


def test_scan_does_not_import_the_libraries_of_lint(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    command = [sys.executable, "-c", SCAN]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "AMP106" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "imported torch"
