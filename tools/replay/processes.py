"""Runs cases in two processes at a time, a few per process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from multiprocessing.connection import Connection

from tests.support.paths import ROOT
from tools.replay.case import Case, Outcome, run_case
from tools.replay.table import all_cases

WORKERS = 2
CASES = 40  # of one process: it starts in no time, but torch does things at first use
_SET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),  # processes that a case starts run this checkout, too
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}
_UNSET = ("COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "PYTHONIOENCODING")
_CONTEXT = multiprocessing.get_context("forkserver")


def outcomes_of(cases: Sequence[Case]) -> Iterator[Outcome]:
    """Run the cases, and yield their outcomes in the same order."""
    os.chdir(ROOT)  # so that the server finds what it is to import
    os.environ.update(_SET)
    os.environ.setdefault("PYTHONHASHSEED", "0")
    for name in _UNSET:
        os.environ.pop(name, None)
    _CONTEXT.set_forkserver_preload(["tools.replay.table", "torch.export", "torch._dynamo", "transformers"])
    with ThreadPoolExecutor(WORKERS) as pool:
        for outcomes in pool.map(_in_a_process, _groups([case.name for case in cases])):
            yield from outcomes


def _groups(names: Sequence[str]) -> Iterator[list[str]]:
    """Yield groups of a few cases of the same family."""
    for _, of_a_family in groupby(names, lambda name: name.partition("/")[0]):
        family = list(of_a_family)
        yield from (family[start : start + CASES] for start in range(0, len(family), CASES))


def _in_a_process(names: list[str]) -> list[Outcome]:
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_run, args=(names, sender))
    process.start()
    sender.close()
    outcomes: list[Outcome] = []
    try:
        while len(outcomes) < len(names):
            outcomes.append(receiver.recv())
    except EOFError:
        process.join()
        end = f"the process ended with exit code {process.exitcode}\n"
        outcomes += [Outcome(name, end, 0.0, crashed=True) for name in names[len(outcomes) :]]
    process.join()
    return outcomes


def _run(names: list[str], sender: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    cases = {case.name: case for case in all_cases()}
    for name in names:
        sender.send(run_case(cases[name]))
