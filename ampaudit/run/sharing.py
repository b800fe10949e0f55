"""Shares one FP32 reference between policies, so that equal ops are computed once.

Policies insert different casts into one model; the rest of their graphs is mostly the same. So the runs
proceed side by side, the first a step ahead. An op that receives the very tensors that the first run passed
to the same op reuses its result. Where the graphs differ (code that checks a dtype), so do the inputs, and
the op is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ampaudit.core.sites import SiteId
from ampaudit.run.program import Program
from ampaudit.run.step import Step

__all__ = ["MISSING", "Interleaved", "SharedReference"]

MISSING = object()
Upcoming = Generator[tuple[Step, ...], None, list[Any]]


@dataclass(slots=True)
class _Result:
    target: Any
    leaves: list[Any]
    value: Any
    uses_left: int


@dataclass(slots=True)
class SharedReference:
    """Results of the first of several runs, kept until all other runs have used them.

    Attributes:
        programs: Programs of all runs, starting with the first run's.
        reused: Number of results that were not computed again.
    """

    programs: Sequence[Program]
    reused: int = 0
    _results: dict[SiteId, _Result] = field(default_factory=dict)
    _done: set[SiteId] = field(default_factory=set)
    _uses: dict[SiteId, int] = field(default_factory=dict)
    _leading: frozenset[SiteId] = frozenset()

    def __post_init__(self) -> None:
        first, *others = [{s.site.id for s in p.steps if s.site is not None} for p in self.programs]
        self._leading = frozenset(first)
        for sites in others:
            for site in sites & first:
                self._uses[site] = self._uses.get(site, 0) + 1

    def offer(self, step: Step, program: Program, args: Any, kwargs: Any, value: Any) -> None:
        """Keep a result of the first run."""
        if step.site is None:
            return
        self._done.add(step.site.id)
        uses = self._uses.get(step.site.id, 0)
        if uses and _shareable(step, program):
            leaves = pytree.tree_leaves((args, kwargs))
            self._results[step.site.id] = _Result(step.target, leaves, value, uses)

    def take(self, step: Step, program: Program, args: Any, kwargs: Any) -> Any:
        """Return the first run's result of the same op on the same tensors, or ``MISSING``."""
        result = self._results.get(step.site.id) if step.site is not None else None
        if result is None or step.site is None:
            return MISSING
        result.uses_left -= 1
        if result.uses_left == 0:
            del self._results[step.site.id]
        leaves = pytree.tree_leaves((args, kwargs))
        same = result.target is step.target and len(leaves) == len(result.leaves)
        if not same or not _shareable(step, program) or not all(map(_same, leaves, result.leaves)):
            return MISSING
        self.reused += 1
        return result.value

    def ready(self, group: tuple[Step, ...]) -> bool:
        """Return whether the first run has passed every shared site of a group."""
        sites = (step.site.id for step in group if step.site is not None)
        return all(site in self._done or site not in self._leading for site in sites)

    def finish(self) -> None:
        """Mark all steps of the first run as done."""
        self._done |= self._leading


class Interleaved:
    """Runs that proceed side by side, group by group, the first one ahead."""

    def __init__(self, runs: Sequence[Upcoming], shared: SharedReference | None) -> None:
        self._runs, self._shared = runs, shared
        self._results: list[list[Any]] = [[] for _ in runs]
        self._waiting: dict[int, tuple[Step, ...]] = {}
        for index in range(len(runs)):
            self._next(index)

    def advance(self, stops: Callable[[int], bool] = lambda index: False) -> list[list[Any]] | None:
        """Advance every run until it stops; return all results once all runs have ended.

        Args:
            stops: Whether the run with an index stops before its next group.
        """
        progressed = True
        while progressed:
            progressed = self._may_go(0, stops)
            if progressed:
                self._next(0)
            for index in range(1, len(self._runs)):
                while self._may_go(index, stops):
                    progressed = True
                    self._next(index)
        return None if self._waiting else self._results

    def _may_go(self, index: int, stops: Callable[[int], bool]) -> bool:
        if index not in self._waiting or stops(index):
            return False
        return index == 0 or self._shared is None or self._shared.ready(self._waiting[index])

    def _next(self, index: int) -> None:
        try:
            self._waiting[index] = next(self._runs[index])
        except StopIteration as end:
            self._results[index] = end.value
            self._waiting.pop(index, None)
            if index == 0 and self._shared is not None:
                self._shared.finish()


def _shareable(step: Step, program: Program) -> bool:
    """Return whether an op is deterministic, and no step writes to its result or inputs."""
    touched = (step.node, *step.node.all_input_nodes)
    return not step.mutates and not step.random and not any(node in program.written for node in touched)


def _same(first: Any, second: Any) -> bool:
    """Return whether values are equal constants or views of the same memory, which is kept alive."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first is second or (
            first.data_ptr() == second.data_ptr()
            and first.dtype == second.dtype
            and first.shape == second.shape
            and first.stride() == second.stride()
        )
    return type(first) is type(second) and bool(first == second)
