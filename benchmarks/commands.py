"""Times whole commands, alternating each with a baseline, such as the imports that it cannot avoid.

Each command runs in its own process. The baseline of ``check`` of ten targets is ``check`` of one.

    python -m benchmarks.commands [--repeats 7] [--json FILE]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from transformers import BertConfig, BertModel

from benchmarks.options import TINY_BERT, parser
from benchmarks.timing import seconds

MODEL = """
import torch
from torch import nn

def get_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 8))

def example_inputs():
    return torch.randn(4, 64)
"""
LOAD = "import torch, transformers; transformers.BertModel.from_pretrained({!r})"
AMPAUDIT = (sys.executable, "-m", "ampaudit")


def pairs(folder: Path, targets: int) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
    """Write the files of the commands, and return each command with its baseline, by name."""
    files = [folder / f"model_{number}.py" for number in range(targets)]
    for file in files:
        file.write_text(MODEL, encoding="utf-8")
    directory = folder / "bert"
    BertModel(BertConfig(**TINY_BERT)).save_pretrained(directory)
    names = [str(file) for file in files]
    python = (sys.executable, "-c")
    return {
        "scan of a file": ((*AMPAUDIT, "scan", names[0]), (*python, "import torch, torch.export")),
        "scan of a directory": (
            (*AMPAUDIT, "scan", str(directory)),
            (*python, LOAD.format(str(directory))),
        ),
        f"check of {targets} targets": ((*AMPAUDIT, "check", *names), (*AMPAUDIT, "check", names[0])),
        "lint of a file": ((*AMPAUDIT, "lint", names[0]), (*python, "")),
        "--help": ((*AMPAUDIT, "--help"), (*python, "")),
    }


def command_seconds(command: Sequence[str]) -> float:
    """Return the seconds of a command that must succeed."""
    return seconds(partial(subprocess.run, command, check=True, capture_output=True))


def main(argv: Sequence[str] | None = None) -> None:
    """Time each command and its baseline alternately, and print medians with their spread."""
    arguments = parser(__doc__, repeats=7)
    options = arguments.parse_args(argv)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, commands in pairs(Path(folder), 2 if options.smoke else 10).items():
            if not options.smoke:  # the first run reads files from the disk
                for command in commands:
                    command_seconds(command)
            times = [[command_seconds(command) for command in commands] for _ in range(options.repeats)]
            ratios = [ours / base for ours, base in times]
            ours, base = (statistics.median(column) for column in zip(*times, strict=True))
            rows[name] = {"seconds": ours, "base": base, "ratios": ratios}
            spread = f"{statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{name:24}  {ours:6.2f} s  beside {base:.2f} s  {spread}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
