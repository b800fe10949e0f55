"""Checks random programs against their bounds, which no value may leave; prints minimal counterexamples.

    python -m benchmarks.soundness [--graphs 100000] [--seed 0] [--processes 2] [--samples 4] [--json FILE]

Each seed yields 40 branches of up to six steps (``tests/support/soundness``), which are traced as one model,
bounded, and run on hostile inputs, both in their true dtypes and as a scan emulates them. Then follow torch's
own sample inputs, ``--samples`` for each op, in their own and in wider ranges, in float32 and float16.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import re
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime

import torch
from torch.testing._internal.common_methods_invocations import op_db

from benchmarks.options import parser
from tests.support.soundness.fuzz import (
    BRANCHES,
    RAISED,
    SETTINGS,
    Counterexample,
    Report,
    Setting,
    examine_seed,
    shrunk,
)
from tests.support.soundness.samples import sample_problems

SHOWN = 2  # of each class
SAMPLED = (Setting("as-is", "float16"), Setting("half", "float16"))
CHUNK = 50  # tasks for one set of processes


def kind_of(example: Counterexample) -> str:
    """Return the class of a counterexample: the op at which a value first escapes, or the exception."""
    if example.problem.startswith(RAISED):
        return re.sub(r"\d+", "N", example.problem)[:100]
    target = re.search(r"target=([\w.:]+)", example.problem) or re.search(r"(\w+) :", example.problem)
    kind = "not finite" if "was proved" in example.problem else "escapes"
    return f"{target[1] if target else '?'} {kind}"


def examine(task: tuple[int, int]) -> Report:
    """Examine the programs of one seed; runs in a separate process."""
    seed, rounds = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return examine_seed(seed, SETTINGS[seed % len(SETTINGS)], rounds=rounds)


def run(graphs: int, seed: int, processes: int, rounds: int) -> tuple[Report, list[int]]:
    """Examine at least ``graphs`` graphs, printing progress; also return the seeds that crashed torch."""
    total, crashed, started, shown = Report(), list[int](), time.perf_counter(), 0.0
    seen: set[str] = set()
    tasks = [(seed + index, rounds) for index in range(-(-graphs // BRANCHES))]
    for at in range(0, len(tasks), CHUNK):
        reports, lost = run_tasks(tasks[at : at + CHUNK], processes)
        for task in lost:  # one of them ended its process, so each is run again in its own process
            alone, again = run_tasks([task], 1)
            reports += alone
            crashed += [failed for failed, _ in again]
        for report in reports:
            total.add(report)
            for example in report.found:
                if (kind := kind_of(example)) not in seen:
                    seen.add(kind)
                    print(f"{kind}, not reduced yet:\n{example}\n", flush=True)
        passed = time.perf_counter() - started
        if passed - shown > 20:
            shown = passed
            print(f"{total.branches} graphs, {len(total.found)} found, {passed:.0f} s", flush=True)
    return total, crashed


def run_tasks(tasks: list[tuple[int, int]], processes: int) -> tuple[list[Report], list[tuple[int, int]]]:
    """Examine seeds in several processes; also return the tasks that were lost because a process crashed."""
    reports, lost = [], []
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        waiting = {task: pool.submit(examine, task) for task in tasks}
        for task, future in waiting.items():
            try:
                reports.append(future.result())
            except concurrent.futures.process.BrokenProcessPool:
                lost.append(task)
    return reports, lost


def problems_of_op(task: tuple[int, int]) -> list[str]:
    """Return the wrong bounds of torch's samples of one op, under the settings that CPU kernels support."""
    index, count = task
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = [sample_problems(op_db[index], setting, count) for setting in SAMPLED]
    return [problem for problems in found for problem in problems]


def problems_of_samples(ops: int, count: int, processes: int) -> list[str]:
    """Return the wrong bounds of torch's samples of the first ``ops`` ops."""
    tasks = [(index, count) for index in range(ops)] if count else []
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        return [problem for problems in pool.map(problems_of_op, tasks, chunksize=10) for problem in problems]


def main(arguments: Sequence[str] | None = None) -> None:
    words = parser(__doc__)
    words.add_argument("--graphs", type=int, default=100_000, help="number of random programs")
    words.add_argument("--seed", type=int, default=0, help="the first seed")
    words.add_argument("--processes", type=int, default=2)
    words.add_argument("--rounds", type=int, default=7, help="inputs of each program")
    words.add_argument("--samples", type=int, default=4, help="torch's samples of each op; 0 for none")
    options = words.parse_args(arguments)
    ops = len(op_db)
    if options.smoke:
        ops, options.graphs, options.processes, options.rounds, options.samples = 1, 1, 1, 1, 1
    started = time.perf_counter()
    total, crashed = run(options.graphs, options.seed, options.processes, options.rounds)
    seconds = time.perf_counter() - started
    classes: defaultdict[str, list[Counterexample]] = defaultdict(list)
    for example in total.found:
        classes[kind_of(example)].append(example)
    for kind, examples in sorted(classes.items(), key=lambda item: -len(item[1])):
        print(f"\n== {kind}: {len(examples)}")
        smallest = sorted(examples, key=lambda e: len(e.branch.lines))[:SHOWN]
        for example in smallest:
            print(shrunk(example), end="\n\n", flush=True)
    values, bounded = total.values.total(), total.bounded.total()
    print(
        f"{total.branches} graphs in {seconds:.0f} s ({total.untraced} not traced, {total.not_run} not run); "
        f"{values} values, {bounded / max(values, 1):.0%} with bounds tighter than their dtype; "
        f"{len(total.found)} counterexamples; torch crashed with the seeds {crashed}"
    )
    problems = problems_of_samples(ops, options.samples, options.processes)
    print("\n".join(problems) or f"torch's samples, {options.samples} of each of {ops} ops: nothing escapes")
    if options.json:
        data = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "seed": options.seed,
            "rounds": options.rounds,
            "graphs": total.branches,
            "untraced": total.untraced,
            "not_run": total.not_run,
            "crashed": crashed,
            "values": values,
            "bounded": bounded,
            "seconds": round(seconds, 1),
            "counterexamples": len(total.found),
            "samples": {"ops": ops, "each": options.samples, "problems": problems},
            "classes": dict(Counter(kind_of(example) for example in total.found).most_common()),
            "ops": {op: [total.bounded[op], count] for op, count in sorted(total.values.items())},
        }
        options.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
