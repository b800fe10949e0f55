"""Starts child processes that import nothing from the current directory, and kills their process trees."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from ampaudit.core import interrupts
from ampaudit.core.forkserver import ForkedProcess, start_forked, start_interpreter
from ampaudit.core.text import escape_control, format_bytes

_MAX_LINE = 200


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Limits of a process and its children; ``None`` means unlimited."""

    seconds: float | None = None  # of wall-clock time
    memory: int | None = None  # resident bytes of all its processes together


class ChildProcess:
    """A process that calls one of our functions, together with its children.

    Takes the arguments of ``start_forked``, with a file for standard output and error (``log``) in place of
    streams. On platforms other than Linux, nothing is imported ahead.
    """

    def __init__(
        self,
        target: str,
        *arguments: str,
        log: Path,
        environment: Mapping[str, str],
        variables: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        folder: Path | None = None,
    ) -> None:
        self._log = log
        self._started = time.perf_counter()
        self.peak_bytes = 0
        variables = variables or {}
        self._process: ForkedProcess | subprocess.Popen[bytes]
        with log.open("wb") as stream, open(os.devnull, "r+b") as null, interrupts.Deferred():
            streams = null, stream, stream
            if sys.platform == "linux":
                self._process = start_forked(
                    target,
                    *arguments,
                    imports=imports,
                    environment=environment,
                    variables=variables,
                    streams=streams,
                    folder=folder,
                )
            else:
                self._process = start_interpreter(
                    target,
                    *arguments,
                    environment={**environment, **variables},
                    streams=streams,
                    folder=folder,
                )
            interrupts.at_end(self._kill)

    @property
    def seconds(self) -> float:
        """Seconds since the start of the process."""
        return time.perf_counter() - self._started

    def running(self, wait: float = 0.0) -> bool:
        """Wait up to ``wait`` seconds for the process to end, and return whether it is still running."""
        self.peak_bytes = max(self.peak_bytes, _resident(self._process.pid))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait)
        return self._process.poll() is None

    def exceeded(self, limits: ChildLimits) -> tuple[Literal["seconds", "memory"], str] | None:
        """Return the exceeded limit and a description; ``None`` if the process is within its limits."""
        if limits.seconds is not None and self.seconds > limits.seconds:
            return "seconds", f"stopped after {limits.seconds:g} s"
        if limits.memory is not None and self.peak_bytes > limits.memory:
            used, allowed = format_bytes(self.peak_bytes), format_bytes(limits.memory)
            return "memory", f"stopped at {used} of memory; {allowed} are allowed"
        return None

    def stop(self) -> None:
        """Kill the process and all its children."""
        with interrupts.Deferred():
            self._kill()
            interrupts.forget(self._kill)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:  # Windows has no process groups, and a process that has ended has no list of children
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        child.kill()
                self._process.kill()
        self._process.wait()

    @property
    def killed_by(self) -> str | None:
        """Name of the signal that ended the process; ``None`` if it exited by itself or still runs."""
        code = self._process.returncode
        return None if code is None or code >= 0 else signal.Signals(-code).name

    def death(self) -> str:
        """Describe how a process that left no result ended."""
        if self.killed_by is not None:
            return f"its process was killed by {self.killed_by}"
        last = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        code = self._process.wait()
        # Windows reports a crash as a status that is documented in hexadecimal
        return f"its process ended with exit code {code if code < 1 << 31 else hex(code)}" + (
            f": {escape_control(last[0][:_MAX_LINE])}" if last else ""
        )


def child_environment() -> dict[str, str]:
    """Return the environment without empty entries of PYTHONPATH, which mean the current directory."""
    environment = dict(os.environ)
    entries = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if "PYTHONPATH" in environment:
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    return environment


def _resident(pid: int) -> int:
    """Return the resident bytes of a process and its children; 0 if it has ended."""
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += int(member.memory_info().rss)
    return total
