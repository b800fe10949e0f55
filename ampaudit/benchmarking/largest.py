"""Searches for the largest batch that fits: measured on a GPU, predicted for a named device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ampaudit.benchmarking.mode_runs import release_memory, start_run
from ampaudit.benchmarking.modes import BenchSetup, ModeRunner, NotSupported, build_mode, with_batch_size
from ampaudit.benchmarking.predict import holds_graph, predict_step
from ampaudit.core.config import Progress
from ampaudit.report.bench import Largest

__all__ = ["largest", "search"]


def largest(setup: BenchSetup, modes: Sequence[str], progress: Progress) -> Iterator[Largest]:
    """Search each mode, by measuring on a GPU or by predicting for the memory of ``--for``."""
    for index, mode in enumerate(modes):
        progress("largest batch", index, len(modes))
        fits, how = _fits(mode, setup)
        if fits is not None:
            yield Largest(mode, search(fits), how)


def _fits(mode: str, setup: BenchSetup) -> tuple[Callable[[int], bool] | None, str]:
    """Return a test for one batch size, if possible, and how it is made."""
    target = setup.target
    if target is not None:
        if not target.memory_gb:
            return None, ""
        limit = target.memory_gb * 1e9
        runner = _any_size_runner(mode, setup)
        if runner is None:
            return None, ""
        return (
            lambda size: predict_step(runner, setup, size=size)[0].peak <= limit,
            f"predicted, for {target.memory_gb:g} GB",
        )
    if setup.device.type != "cuda":
        return None, ""

    def measured_fits(size: int) -> bool:
        run = start_run(mode, with_batch_size(setup, size), size)
        fits = run.row.status == "ok"
        run.runner = run.batch = None
        release_memory(setup.device)
        return fits

    return measured_fits, "measured"


def _any_size_runner(mode: str, setup: BenchSetup) -> ModeRunner | None:
    """Build a mode that takes any batch size; a graph is for the size of its trace."""
    try:
        runner = build_mode(mode, setup)
    except NotSupported:
        return None
    return None if holds_graph(runner.model) else runner


def search(fits: Callable[[int], bool], limit: int = 1 << 20) -> int:
    """Return the largest size up to ``limit`` that fits, by doubling and then bisecting; 0 if none does.

    Above 64 it is found to 3 %, not exactly: each try takes seconds.
    """
    size = 1
    if not fits(size):
        return 0
    while size < limit and fits(size * 2):
        size *= 2
    step = size // 2
    while step >= max(1, size // 64):
        if size + step <= limit and fits(size + step):
            size += step
        step //= 2
    return size
