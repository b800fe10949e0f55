"""Times the whole command ``ampaudit lint`` over 1,000 files of 300 lines on two cores.

There are two sets of files. In the first, each has one of the tests' correct training loops, surrounded by
code typical of projects (datasets, metrics, options). In the second, each consists of training loops only.
In the same run, Python's own parser reads the same files.

    python -m benchmarks.linting [--repeats 5] [--cores 2] [--json FILE]
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import parser

ROOT = Path(__file__).resolve().parents[1]
LINES = 300
FILLER = '''

class Samples(Dataset):
    """Images and labels from a folder."""

    def __init__(self, root, transform=None, extensions=(".png", ".jpg")):
        self.root = Path(root)
        self.transform = transform
        self.paths = sorted(p for p in self.root.rglob("*") if p.suffix in extensions)
        self.labels = {name: i for i, name in enumerate(sorted({p.parent.name for p in self.paths}))}

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        image = Image.open(path).convert("RGB")
        if self.transform is not None:
            image = self.transform(image)
        return image, self.labels[path.parent.name]


def accuracy(output, target, topk=(1,)):
    maxk = max(topk)
    batch_size = target.size(0)
    _, pred = output.topk(maxk, 1, True, True)
    correct = pred.t().eq(target.view(1, -1).expand_as(pred))
    return [correct[:k].reshape(-1).float().sum(0) * 100.0 / batch_size for k in topk]


def parse_options(argv=None):
    parser = argparse.ArgumentParser(description="Trains a model")
    parser.add_argument("--data", default="data", help="folder with images")
    parser.add_argument("--epochs", type=int, default=90, help="number of epochs")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(argv)
    if options.seed is not None:
        random.seed(options.seed)
    return options


class Meter:
    """Computes and stores the average and current value."""

    def __init__(self, name):
        self.name = name
        self.reset()

    def reset(self):
        self.value = self.average = self.total = self.count = 0

    def update(self, value, n=1):
        self.value = value
        self.total += value * n
        self.count += n
        self.average = self.total / self.count
'''
HEAD = """import argparse
import random
from pathlib import Path

from PIL import Image
from torch.utils.data import Dataset

"""


def project(folder: Path, count: int, *, only_loops: bool) -> int:
    """Write the files, and return their total size in characters."""
    with (ROOT / "tests/data/lint/correct-styles.jsonl").open(encoding="utf-8") as scripts:
        loops = [json.loads(script)["source"] for script in scripts]
    around = itertools.cycle(loops)
    size = 0
    for number in range(count):
        lines = HEAD.splitlines() + next(around).splitlines()
        while len(lines) < LINES:
            more = next(around) if only_loops else FILLER
            lines += [line for line in more.splitlines() if not line.startswith("from __future__")]
        text = _cut(lines)
        (folder / f"train_{number:04}.py").write_text(text, encoding="utf-8")
        size += len(text)
    return size


def _cut(lines: list[str]) -> str:
    """Return the longest prefix of at most 300 lines that parses, padded with comments."""
    for end in range(LINES, 0, -1):
        text = "\n".join(lines[:end])
        try:
            ast.parse(text)
        except SyntaxError:
            continue
        return text + "\n#" * (LINES - end) + "\n"
    raise AssertionError("no script")


def command_seconds(*command: str) -> float:
    """Return the seconds of a command, which may report findings."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return time.perf_counter() - start


PARSE = "import ast,pathlib,sys\nfor p in pathlib.Path(sys.argv[1]).iterdir(): ast.parse(p.read_text())"


def measure(count: int, repeats: int, *, only_loops: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = project(folder, count, only_loops=only_loops)
        runs: dict[str, list[float]] = {"lint": [], "python's parser alone": []}
        for _ in range(repeats):
            runs["lint"].append(command_seconds(sys.executable, "-m", "ampaudit", "lint", "-q", str(folder)))
            runs["python's parser alone"].append(command_seconds(sys.executable, "-c", PARSE, str(folder)))
    times = {
        name: {"median_s": statistics.median(t), "least_s": min(t), "most_s": max(t)}
        for name, t in runs.items()
    }
    return {"files": count, "lines": count * LINES, "bytes": size, **times}


def main(arguments: Sequence[str] | None = None) -> None:
    options_of = parser(__doc__, repeats=5)
    options_of.add_argument("--cores", type=int, default=2, help="cores for lint; the parser uses one")
    options = options_of.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))[-options.cores :]
    os.sched_setaffinity(0, cores)  # for the commands, too
    result: dict[str, Any] = {"python": platform.python_version(), "cores": len(cores)}
    for label, count, only in (
        ("1,000 files, a loop in each", 1000, False),
        ("1,000 files, loops only", 1000, True),
        ("250 files, a loop in each", 250, False),
        ("500 files, a loop in each", 500, False),
    ):
        result[label] = measure(2 if options.smoke else count, options.repeats, only_loops=only)
        lint, parse = result[label]["lint"], result[label]["python's parser alone"]
        print(
            f"{label}: {lint['median_s']:.2f} s ({lint['least_s']:.2f} to {lint['most_s']:.2f}),"
            f" python's parser alone {parse['median_s']:.2f} s"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
