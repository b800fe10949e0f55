"""Runs a function on many items, in several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

__all__ = ["Run", "available_cores", "processes"]

_AT_ONCE = 16  # items that travel together
Item = TypeVar("Item")
Result = TypeVar("Result")


class Run(Protocol):
    """Calls a function with each item, and yields what it returns, in order."""

    def __call__(self, function: Callable[[Item], Result], items: Sequence[Item], /) -> Iterator[Result]:
        """Call it."""


@contextmanager
def processes(count: int, prepare: Callable[[], None] = lambda: None) -> Iterator[Run]:
    """Give a function like ``map``; with one process, it runs here.

    Each process calls ``prepare`` first.
    Other processes are copies of this one where that is possible, and import the main module elsewhere.
    """
    if count == 1:
        prepare()
        yield map
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(count, context, _start, (prepare,)) as pool:

        def run(function: Callable[[Item], Result], items: Sequence[Item], /) -> Iterator[Result]:
            return pool.map(function, items, chunksize=_AT_ONCE)

        try:
            yield run
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def available_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(prepare: Callable[[], None]) -> None:
    """Prepare a process, and leave an interruption to the one that has started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prepare()
