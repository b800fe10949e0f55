"""Runs checks in separate processes, several at a time, within limits of time and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ampaudit.core.child import ChildLimits, ChildProcess, child_environment
from ampaudit.core.config import Progress
from ampaudit.core.files import temporary_directory
from ampaudit.report.check import Request, TargetResult

__all__ = ["Limits", "check_all"]

_POLL_SECONDS = 0.05
_HINTS = {
    "seconds": "raise --timeout, or find out why the model hangs",
    "memory": "raise --max-memory, or use a smaller batch",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Number of parallel processes, and the limits of each; ``None`` means unlimited."""

    jobs: int = 1
    timeout: float | None = None
    memory: int | None = None


def check_all(requests: Sequence[Request], limits: Limits, on_progress: Progress) -> list[TargetResult]:
    """Return the results in the order of the requests, even if processes die.

    A process that is stopped, or dies, is a result like any other: its target could not be audited.
    """
    waiting = list(enumerate(requests))[::-1]
    running: dict[int, _Worker] = {}
    results: dict[int, TargetResult] = {}
    with temporary_directory("ampaudit-check-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < limits.jobs:
                    number, request = waiting.pop()
                    running[number] = _Worker(request, folder / str(number), limits)
                time.sleep(_POLL_SECONDS)
                for number, worker in list(running.items()):
                    result = worker.poll()
                    if result is not None:
                        results[number] = result
                        del running[number]
                        on_progress("checking", len(results), len(requests))
        finally:
            for worker in running.values():
                worker.stop()
    return [results[number] for number in range(len(requests))]


class _Worker:
    """One process with its limits."""

    def __init__(self, request: Request, folder: Path, limits: Limits) -> None:
        folder.mkdir()
        self._request, self._limits = request, ChildLimits(limits.timeout, limits.memory)
        self._result = folder / "result.json"
        question = folder / "request.json"
        question.write_bytes(TypeAdapter(Request).dump_json(request))
        self._process = ChildProcess(
            "ampaudit.ci.worker:main",
            str(question),
            str(self._result),
            log=folder / "stderr",
            environment={**child_environment(), **_threads(limits.jobs)},
        )

    def poll(self) -> TargetResult | None:
        """Return the result once there is one."""
        running = self._process.running()
        exceeded = self._process.exceeded(self._limits) if running else None
        if running and exceeded is None:
            return None
        self.stop()  # with children that the model's code left behind
        if exceeded is not None:
            which, what = exceeded
            return self._failed(f"{what}\n  next: {_HINTS[which]}")
        if not self._result.is_file():
            return self._failed(f"{self._process.death()}\n  next: run 'ampaudit scan' on it")
        found = TypeAdapter(TargetResult).validate_json(self._result.read_bytes())
        return replace(found, **self._spent())

    def stop(self) -> None:
        """Kill the process and all its children."""
        self._process.stop()

    def _failed(self, error: str) -> TargetResult:
        return TargetResult(self._request.target, "error", 3, error=error, **self._spent())

    def _spent(self) -> dict[str, Any]:
        return {"seconds": round(self._process.seconds, 2), "peak_bytes": self._process.peak_bytes}


def _threads(jobs: int) -> dict[str, str]:
    """Divide the cores among parallel processes; a single process keeps its default."""
    return {} if jobs == 1 else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
