"""Shows progress on stderr after two seconds: a bar on a terminal, lines in a log."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from ampaudit.core.text import escape_control

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

__all__ = ["ProgressBar"]

PATIENCE_SECONDS = 2.0
LOG_SECONDS = 5.0


class ProgressBar:
    """A bar on a terminal, or a line every few seconds elsewhere; silent for short runs."""

    def __init__(self, what: str) -> None:
        self._what = escape_control(what)
        self._message, self._done, self._total = f"loading {self._what}", 0, 0
        self._phase, self._written = "", 0.0
        self._shown = self._ended = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(PATIENCE_SECONDS, self._show)
        self._timer.daemon = True
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressBar:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._shown, self._ended = False, True
            if self._bar is not None:
                self._bar.stop()

    def update(self, phase: str, done: int, total: int) -> None:
        """Record that step ``done`` of ``total`` is about to run, or that all are done."""
        what = f"{phase} {self._what}: batch" if phase.startswith(("auditing", "measuring")) else f"{phase}:"
        with self._lock:
            self._message, self._done, self._total = escape_control(what), done, total
            if not self._shown:
                return
            if self._bar is not None:
                self._draw()
            elif done < total and self._due(phase):
                self._log()

    def _due(self, phase: str) -> bool:
        """Return whether to print now: in a log, once per phase and then every few seconds."""
        now = time.monotonic()
        if phase != self._phase or now - self._written >= LOG_SECONDS:
            self._phase, self._written = phase, now
            return True
        return False

    def _show(self) -> None:
        bar = _bar() if sys.stderr.isatty() else None  # rich is imported before the lock is taken
        with self._lock:
            if self._ended:
                return
            self._shown = True
            if bar is None:
                self._log()
                return
            self._bar, self._task = bar, bar.add_task(self._message, total=None)
            self._draw()
            bar.start()

    def _draw(self) -> None:
        assert self._bar is not None
        assert self._task is not None
        total = self._total or None
        self._bar.update(self._task, description=self._message, completed=self._done, total=total)

    def _log(self) -> None:
        count = f" {min(self._done + 1, self._total)} of {self._total}" if self._total else ""
        sys.stderr.write(f"{self._message}{count} ...\n")
        sys.stderr.flush()


def _bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    name = TextColumn("{task.description}", markup=False)  # a path may look like markup
    columns = (SpinnerColumn("line"), name, BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn())
    target = Console(stderr=True)
    return Bar(*columns, console=target, transient=True, redirect_stdout=False, redirect_stderr=False)
