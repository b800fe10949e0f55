"""Runs checks in separate processes, several at a time, within limits of time and memory."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from ampaudit.core import interrupts
from ampaudit.core.config import Progress
from ampaudit.core.files import temporary_directory
from ampaudit.core.text import format_bytes
from ampaudit.report.check import Request, TargetResult

__all__ = ["Limits", "check_all"]

_POLL_SECONDS = 0.05


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

    def stop_all() -> None:
        for worker in list(running.values()):
            worker.stop()

    interrupts.at_end(stop_all)
    with temporary_directory("ampaudit-check-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < limits.jobs:
                    number, request = waiting.pop()
                    with interrupts.Deferred():
                        running[number] = _Worker(request, folder / str(number), limits)
                time.sleep(_POLL_SECONDS)
                for number, worker in list(running.items()):
                    result = worker.poll()
                    if result is not None:
                        results[number] = result
                        del running[number]
                        on_progress("checking", len(results), len(requests))
        finally:
            with interrupts.Deferred():
                stop_all()
                interrupts.forget(stop_all)
    return [results[number] for number in range(len(requests))]


class _Worker:
    """One process with its limits."""

    def __init__(self, request: Request, folder: Path, limits: Limits) -> None:
        folder.mkdir()
        self._request, self._limits = request, limits
        self._result, self._log = folder / "result.json", folder / "stderr"
        question = folder / "request.json"
        question.write_bytes(TypeAdapter(Request).dump_json(request))
        self._started = time.perf_counter()
        self._peak = 0
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ampaudit.ci.worker", str(question), str(self._result)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **_threads(limits.jobs)},
                start_new_session=True,  # so that its children are stopped with it
            )

    def poll(self) -> TargetResult | None:
        """Return the result once there is one."""
        seconds = time.perf_counter() - self._started
        self._peak = max(self._peak, _resident(self._process.pid))
        limits = self._limits
        if self._process.poll() is None:
            if limits.timeout is not None and seconds > limits.timeout:
                what, hint = (
                    f"stopped after {limits.timeout:g} s",
                    "raise --timeout, or find out why the model hangs",
                )
            elif limits.memory is not None and self._peak > limits.memory:
                what = (
                    f"stopped at {format_bytes(self._peak)} of memory; "
                    f"{format_bytes(limits.memory)} are allowed"
                )
                hint = "raise --max-memory, or use a smaller batch"
            else:
                return None
            self.stop()
            return self._failed(f"{what}\n  next: {hint}", seconds)
        self.stop()  # children that the model's code left behind
        if not self._result.is_file():
            return self._failed(f"{self._death()}\n  next: run 'ampaudit scan' on it", seconds)
        found = TypeAdapter(TargetResult).validate_json(self._result.read_bytes())
        return replace(found, seconds=round(seconds, 2), peak_bytes=self._peak)

    def stop(self) -> None:
        """Kill the process and all its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()

    def _failed(self, error: str, seconds: float) -> TargetResult:
        return TargetResult(
            self._request.target, "error", 3, error=error, seconds=round(seconds, 2), peak_bytes=self._peak
        )

    def _death(self) -> str:
        code = self._process.returncode
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        last = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return f"its process ended with exit code {code}" + (f": {last[0][:200]}" if last else "")


def _threads(jobs: int) -> dict[str, str]:
    """Divide the cores among parallel processes; a single process keeps its default."""
    return {} if jobs == 1 else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}


def _resident(pid: int) -> int:
    """Return the resident bytes of a process and its children; 0 if it has ended."""
    try:
        process = psutil.Process(pid)
        return sum(_rss(member) for member in _family(process))
    except psutil.Error:
        return 0


def _family(process: psutil.Process) -> Iterable[psutil.Process]:
    yield process
    yield from process.children(recursive=True)


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
