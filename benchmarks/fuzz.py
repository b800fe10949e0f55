"""Reads mutated files of every format, and counts outcomes by format; prints each defect.

An input is determined by the name of its format and a number: ``--formats pt2 --first 71 --inputs 1``
reproduces one. Inputs run in forked processes, up to 200 in each. If a process dies or hangs, that is a
defect of the input that it was reading.

    python -m benchmarks.fuzz [--minutes 60 | --inputs 2000] [--formats pt2,report] [--first 0] [--jobs 2]
                              [--keep DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.options import parser
from tests.fuzz.formats import FORMATS, judged, mutated
from tests.fuzz.judge import PATIENCE, write_files

BATCH = 200
Input = tuple[str, int]


def inputs_of_job(names: list[str], first: int, job: int, jobs: int) -> Iterator[Input]:
    """Yield every ``jobs``-th input: formats alternate by their shares, and each has its own numbers."""
    turn = [name for name in names for _ in range(FORMATS[name].share)]
    Random(0).shuffle(turn)
    numbers = {name: itertools.count(first) for name in names}
    every = ((name, next(numbers[name])) for name in itertools.cycle(turn))
    return itertools.islice(every, job, None, jobs)


def run_batch(batch: list[Input], end: float, pipe: int, keep: Path | None) -> None:
    """Judge inputs, and write a line for each to the pipe; runs in a forked process."""
    for name, number in batch:
        if time.monotonic() > end:
            break
        started = time.perf_counter()
        place = keep / f"{name}-{number}" if keep is not None else None
        verdict = judged(FORMATS[name], Random(f"{name}:{number}"), keep=place)
        seconds = time.perf_counter() - started
        os.write(pipe, (json.dumps([verdict.outcome, verdict.detail[:400], seconds]) + "\n").encode())
        if verdict.detail.endswith("MiB"):  # of memory: later inputs would be blamed for it
            break


def forked(batch: list[Input], end: float, keep: Path | None) -> list[tuple[str, str, float]]:
    """Run a batch in a forked process, and return the results of its inputs.

    If the process dies, hangs or stops early, inputs after that one have no result.
    """
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            run_batch(batch, end, theirs, keep)
            os._exit(0)
        finally:
            os._exit(1)
    os.close(theirs)
    text, hangs = b"", False
    while True:
        if not select.select([mine], [], [], PATIENCE + 20)[0]:
            hangs = True
            os.kill(child, signal.SIGKILL)
            break
        data = os.read(mine, 1 << 16)
        if not data:
            break
        text += data
    os.close(mine)
    status = os.waitpid(child, 0)[1]
    found = [tuple(json.loads(line)) for line in text.decode().splitlines()]
    if len(found) < len(batch) and status != 0:
        how = "hangs" if hangs else f"ended the process with {os.waitstatus_to_exitcode(status)}"
        found.append(("defect", how, 0.0))
        if keep is not None:
            name, number = batch[len(found) - 1]
            write_files(keep / f"{name}-{number}", mutated(FORMATS[name], Random(f"{name}:{number}"))[0])
    return found


def work(job: int, options: argparse.Namespace, results: Any) -> None:
    """Run the inputs of one job until its time is over or it has run its number of inputs."""
    end = time.monotonic() + options.minutes * 60
    left = options.inputs // options.jobs + (job < options.inputs % options.jobs)
    inputs = inputs_of_job(options.formats, options.first, job, options.jobs)
    waiting: list[Input] = []
    try:
        while left > 0 and time.monotonic() < end:
            waiting += [next(inputs) for _ in range(min(BATCH, left) - len(waiting))]
            done = forked(waiting, end, options.keep)
            results.put([(*item, *result) for item, result in zip(waiting, done, strict=False)])
            waiting = waiting[len(done) :]
            left -= len(done)
    finally:
        results.put(None)


def summary(results: Any, jobs: int) -> dict[str, Any]:
    """Count the outcomes that the jobs report, by format, with one example of each defect."""
    formats: dict[str, dict[str, Any]] = {}
    while jobs:
        batch = results.get()
        jobs -= batch is None
        for name, number, outcome, detail, seconds in batch or ():
            row = formats.setdefault(
                name, {"inputs": 0, "accepted": 0, "refused": 0, "defect": 0, "slowest_s": 0.0, "defects": {}}
            )
            row["inputs"] += 1
            row[outcome] += 1
            row["slowest_s"] = round(max(row["slowest_s"], seconds), 2)
            if outcome == "defect":
                known = row["defects"].setdefault(
                    detail[:90], {"count": 0, "first": number, "detail": detail}
                )
                known["count"] += 1
    return formats


def main(arguments: Sequence[str] | None = None) -> None:
    words = parser(__doc__)
    words.add_argument("--minutes", type=float, default=60.0, help="time after which no more inputs are run")
    words.add_argument("--inputs", type=int, default=10**9, help="number of inputs, over all formats")
    words.add_argument(
        "--formats",
        type=lambda text: text.split(","),
        default=list(FORMATS),
        help=f"comma-separated, of {', '.join(FORMATS)} (default: all)",
    )
    words.add_argument("--first", type=int, default=0, help="number of the first input of each format")
    words.add_argument("--jobs", type=int, default=2, help="processes at a time")
    words.add_argument("--keep", type=Path, help="folder for the inputs that caused defects")
    options = words.parse_args(arguments)
    if options.smoke:
        options.formats, options.inputs, options.jobs = ["report"], 4, 1
    for name in options.formats:
        FORMATS[name].honest()  # once, before processes are forked
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    jobs = [context.Process(target=work, args=(job, options, results)) for job in range(options.jobs)]
    started = time.monotonic()
    for process in jobs:
        process.start()
    formats = summary(results, options.jobs)
    for process in jobs:
        process.join()
    for name, row in sorted(formats.items()):
        counts = ", ".join(f"{row[key]} {key}" for key in ("accepted", "refused", "defect"))
        print(f"{name}: {row['inputs']} inputs, {counts}; slowest {row['slowest_s']} s")
        for known in row["defects"].values():
            print(f"  {known['count']} x {name}:{known['first']} {known['detail'][:160]}")
    total = sum(row["inputs"] for row in formats.values())
    found = sum(row["defect"] for row in formats.values())
    print(f"{total} inputs in {time.monotonic() - started:.0f} s, {found} defects")
    if options.json is not None:
        options.json.write_text(json.dumps(formats, indent=1) + "\n", encoding="utf-8")
    if found:
        sys.exit(1)


if __name__ == "__main__":
    main()
