"""The largest batch that fits: measured on a GPU, predicted for the memory of a named device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ampaudit.bench.mode_runs import prepared, release
from ampaudit.bench.modes import BenchTarget, ModeRunner, NotSupported, build, sized
from ampaudit.bench.predict import holds_graph, predicted
from ampaudit.core.config import Progress
from ampaudit.report.bench import Largest

__all__ = ["largest", "search"]


def largest(subject: BenchTarget, modes: Sequence[str], told: Progress) -> Iterator[Largest]:
    """By doubling and then halving the step; measured on a GPU, predicted for the memory of ``--for``."""
    for index, mode in enumerate(modes):
        told("largest batch", index, len(modes))
        fits, how = _fits(mode, subject)
        if fits is not None:
            yield Largest(mode, search(fits), how)


def _fits(mode: str, subject: BenchTarget) -> tuple[Callable[[int], bool] | None, str]:
    """A test of one size, and how it is made; none where there is no way."""
    target = subject.target
    if target is not None and target.memory_gb:
        most = target.memory_gb * 1e9
        built = _shapeless(mode, subject)
        if built is None:
            return None, ""
        return (
            lambda size: predicted(built, subject, size=size)[0].peak <= most,
            f"predicted, for {target.memory_gb:g} GB",
        )
    if subject.device.type != "cuda":
        return None, ""

    def measured_fits(size: int) -> bool:
        lane = prepared(mode, sized(subject, size), size)
        fits = lane.row.status == "ok"
        lane.built = lane.batch = None
        release(subject.device)
        return fits

    return measured_fits, "measured"


def _shapeless(mode: str, subject: BenchTarget) -> ModeRunner | None:
    """A mode that runs the model's own code, with any batch size; a graph is for the size of its trace."""
    try:
        built = build(mode, subject)
    except NotSupported:
        return None
    return None if holds_graph(built.model) else built


def search(fits: Callable[[int], bool], most: int = 1 << 20) -> int:
    """The largest number up to ``most`` that fits, if smaller ones do as well; 0 if not even 1 does.

    Above 64 it is found to 3 %, not exactly: each try takes seconds.
    """
    size = 1
    if not fits(size):
        return 0
    while size < most and fits(size * 2):
        size *= 2
    step = size // 2
    while step >= max(1, size // 64):
        if size + step <= most and fits(size + step):
            size += step
        step //= 2
    return size
