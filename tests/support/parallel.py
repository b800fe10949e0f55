"""A model whose batches differ: in shape, in what overflows, in what is decided."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from ampaudit.cli.program import main
from ampaudit.core.errors import AuditError
from tests.support.program import Program, run_program

SCAN = ("scan", "mixed.py", "--batches", "9", "--policy", "torch-cuda", "--fail-on", "never", "--force")
AGENT = ("-m", "torch.distributed.run", "--standalone")
_TIMES = {"timings", "seconds", "peak_bytes"}

BATCHES = 9
MODEL = """
import os
import torch
from torch import nn

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 5)

    def forward(self, ids, gain):
        x = self.table(ids)
        x = x + self.down(torch.relu(self.up(self.norm(x)))) * gain
        scores = self.head(x / torch.sqrt((x * 40).pow(2).sum(-1, keepdim=True)))
        return {"scores": scores, "best": scores.mean(1).topk(2).indices, "fine": (scores + 300) - 300}

def get_model():
    return Mixed()

def batches():
    made = torch.Generator().manual_seed(3)
    for number in range(9):
        ids = torch.randint(0, 50, (4, 6 if number % 3 else 9), generator=made)
        yield {"ids": ids, "gain": torch.tensor(200.0 if number == 5 else 1.0)}

def loss(output, batch):
    return output["scores"].float().pow(2).mean() * 30
"""

METRIC = "\ndef metric(output, batch):\n    return output['scores'].mean()\n"


PROMOTING = """
name: promoting
title: large sums in float32
extends: [half]
rules:
- id: promoting/large
  match: {op: [pow.Tensor_Scalar, sum.dim_IntList]}
  when: {dtype: [float16], evidence: {headroom_bits: {below: 2}, mask: false}}
  cast: float32
  reason: range
  why: the test's.
  source: the test
"""


def written(folder: Path, body: str = MODEL) -> Path:
    """Write the model's file."""
    path = folder / "mixed.py"
    path.write_text(body)
    return path


def without_times(path: Path) -> str:
    """Return a JSON report without its timings."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cleaned(item) for key, item in value.items() if key not in _TIMES}
        return [cleaned(item) for item in value] if isinstance(value, list) else value

    return json.dumps(cleaned(json.loads(path.read_text())))


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a rank."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def alone(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ampaudit in one process."""
    return run_program(*words, cwd=folder)


def torchrun(folder: Path, count: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run ampaudit on several ranks of torchrun."""
    return subprocess.run(
        [sys.executable, *AGENT, "--nproc-per-node", str(count), "-m", "ampaudit", *words],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


def started(folder: Path, count: int, *words: str, **more: str) -> list[Program]:
    """Start the ranks as a scheduler without an agent does, which does not end the others with one."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port = str(made.getsockname()[1])
    place = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        Program(*words, cwd=folder, environment={"RANK": str(rank), **place, **more}) for rank in range(count)
    ]


def run(*words: object) -> Result:
    """Run the program; an error is its exit code and its text, as a user has them."""
    done = CliRunner().invoke(main, [str(word) for word in words], catch_exceptions=True)
    if isinstance(done.exception, AuditError):
        done.exit_code = done.exception.exit_code
    else:
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def scanned(folder: Path, *options: str, parts: int = 0) -> Path:
    """Scan in one process, or in parts that are merged; return the report."""
    words = ("scan", "mixed.py", "--batches", BATCHES, "--fail-on", "never", "--force", *options)
    if not parts:
        done = run(*words, "-o", "one.json")
        assert done.exit_code == 0, done.output
        return folder / "one.json"
    files = [f"part-{number}.json" for number in range(1, parts + 1)]
    for number, file in enumerate(files, 1):
        done = run(*words, "--part", f"{number}/{parts}", "-o", file)
        assert (done.exit_code, done.stdout) == (0, ""), done.output
        assert f"part {number} of {parts} written to {file}" in done.stderr
    done = run("merge", *reversed(files), "-o", "merged.json", "--force")
    assert done.exit_code == 0, done.output
    return folder / "merged.json"
