"""Starts processes that import nothing from the current folder, and ends them with their children."""

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

__all__ = ["ChildLimits", "ChildProcess", "child_environment"]

_MAX_LINE = 200


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """Seconds, and bytes of memory in all of its processes; ``None`` means unlimited."""

    seconds: float | None = None
    memory: int | None = None


class ChildProcess:
    """A process that calls one of our functions, with all processes that it starts.

    Args:
        target: ``module:function``, called without arguments.
        arguments: what it finds in ``sys.argv``.
        log: file for what it prints.
        environment: its environment; see ``child_environment``.
        own: further variables, which differ between processes that are otherwise alike.
        imports: modules that it needs; such processes share the time that these take to import (Linux).
        folder: its current directory, if it is not this process's.
    """

    def __init__(
        self,
        target: str,
        *arguments: str,
        log: Path,
        environment: Mapping[str, str],
        own: Mapping[str, str] | None = None,
        imports: Sequence[str] = (),
        folder: Path | None = None,
    ) -> None:
        self._log = log
        self._started = time.perf_counter()
        self.peak_bytes = 0
        own = own or {}
        self._process: ForkedProcess | subprocess.Popen[bytes]
        with log.open("wb") as stream, open(os.devnull, "r+b") as null, interrupts.Deferred():
            streams = null, stream, stream
            if sys.platform == "linux":
                self._process = start_forked(
                    target,
                    *arguments,
                    imports=imports,
                    environment=environment,
                    own=own,
                    streams=streams,
                    folder=folder,
                )
            else:
                self._process = start_interpreter(
                    target, *arguments, environment={**environment, **own}, streams=streams, folder=folder
                )
            interrupts.at_end(self._kill)

    @property
    def seconds(self) -> float:
        """The time since its start."""
        return time.perf_counter() - self._started

    def running(self, wait: float = 0.0) -> bool:
        """Return whether it is still running, after waiting up to some seconds for its end."""
        self.peak_bytes = max(self.peak_bytes, _resident(self._process.pid))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait)
        return self._process.poll() is None

    def exceeded(self, limits: ChildLimits) -> tuple[Literal["seconds", "memory"], str] | None:
        """Return which limit the process has exceeded, and a description."""
        if limits.seconds is not None and self.seconds > limits.seconds:
            return "seconds", f"stopped after {limits.seconds:g} s"
        if limits.memory is not None and self.peak_bytes > limits.memory:
            found, allowed = format_bytes(self.peak_bytes), format_bytes(limits.memory)
            return "memory", f"stopped at {found} of memory; {allowed} are allowed"
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
            else:  # Windows has no groups; a process that has ended no longer tells its children
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        child.kill()
                self._process.kill()
        self._process.wait()

    @property
    def killed_by(self) -> str | None:
        """The signal that ended the process."""
        code = self._process.returncode
        return None if code is None or code >= 0 else signal.Signals(-code).name

    def death(self) -> str:
        """Describe how a process ended that gave no result."""
        if self.killed_by is not None:
            return f"its process was killed by {self.killed_by}"
        last = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        code = self._process.wait()
        # Windows ends a process that crashes with a number that is known in hexadecimal
        return f"its process ended with exit code {code if code < 1 << 31 else hex(code)}" + (
            f": {escape_control(last[0][:_MAX_LINE])}" if last else ""
        )


def child_environment() -> dict[str, str]:
    """Return this process's environment without the empty entries that name the current folder."""
    environment = dict(os.environ)
    entries = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if "PYTHONPATH" in environment:
        environment["PYTHONPATH"] = os.pathsep.join(entries)
    return environment


def _resident(pid: int) -> int:
    """Return the resident bytes of a process and its children; 0 if it has ended."""
    try:
        process = psutil.Process(pid)
        return sum(_rss(member) for member in (process, *process.children(recursive=True)))
    except psutil.Error:
        return 0


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
