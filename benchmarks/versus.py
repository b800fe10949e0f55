"""Compares the times of two checkouts of ampaudit, before a change and after it, interleaved.

Each checkout runs its own code in separate processes. Scan and ``--ranges`` are given in multiples of the
plain forward, the trace and whole commands in seconds.

    git worktree add ../before COMMIT
    python -m benchmarks.versus ../before [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.commands import pairs
from benchmarks.options import parser
from benchmarks.timing import seconds

LOCK_STEP = """
import json, torch
from benchmarks import scan_overhead
scan_overhead.keep_freed_memory()
print(json.dumps(scan_overhead.time_subject({!r}, {}, torch.device("cpu"), **{})))
"""


def output(command: Sequence[str], checkout: Path, **options: str) -> str:
    """Run a command with the code of a checkout, and return what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.run(
        command,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # progress
        text=True,
        **options,
    ).stdout


def lock_step(model: str, checkout: Path, *, smoke: bool) -> Iterator[tuple[str, float]]:
    """Yield the ratios of scan and ranges to the plain forward, and the seconds of the trace, by name."""
    # a checkout from before smoke runs existed does not know the option
    code = LOCK_STEP.format(model, *((1, {"smoke": True}) if smoke else (5, {})))
    printed = output((sys.executable, "-c", code), checkout)
    figures = json.loads(printed.splitlines()[-1])
    for level, ratio in figures["ratio"].items():
        yield f"{model}, {level}, x forward", ratio["median"]
    # the first trace of a process, that of the scan, imports torch._dynamo
    yield f"{model}, trace, s", figures["trace_seconds"]["ranges"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Time both checkouts, and print medians, spread and the ratio of after to before."""
    words = parser(__doc__, repeats=5)
    here = Path(__file__).resolve().parents[1]
    words.add_argument("before", type=Path, nargs="?", default=here, help="a checkout of the earlier commit")
    options = words.parse_args(arguments)
    checkouts = {"before": options.before.resolve(), "after": here}
    figures: dict[str, dict[str, list[float]]] = {}

    def add(name: str, side: str, value: float) -> None:
        figures.setdefault(name, {one: [] for one in checkouts})[side].append(value)

    with tempfile.TemporaryDirectory() as folder:
        commands = dict(list(pairs(Path(folder), 10).items())[3 if options.smoke else 0 :])
        for turn in range(options.repeats + (not options.smoke)):  # the first reads files from the disk
            for name, (command, _) in commands.items():
                for side, checkout in checkouts.items():
                    spent = seconds(partial(output, command, checkout, cwd=folder))
                    if turn or options.smoke:
                        add(f"{name}, s", side, spent)
    for _ in range(options.repeats):
        for model in ("bert",) if options.smoke else ("bert", "resnet"):
            for side, checkout in checkouts.items():
                for name, value in lock_step(model, checkout, smoke=options.smoke):
                    add(name, side, value)
    for name, sides in figures.items():
        shown = [f"{median(times):.2f} ({min(times):.2f} to {max(times):.2f})" for times in sides.values()]
        ratio = median(after / before for before, after in zip(*sides.values(), strict=True))
        print(f"{name:28}  {' -> '.join(shown)}  {ratio:.2f} x")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
