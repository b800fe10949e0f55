"""Shows progress on stderr after two seconds: a bar with the time left on a terminal, lines in a log."""

from __future__ import annotations

import re
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from ampaudit.core.text import escape_control

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

_FIRST_WORD = re.compile(r"[^ ,]*")
PATIENCE_SECONDS = 2.0
LOG_SECONDS = 5.0
_ALL_STEPS = 1e6  # seconds back over which the speed is averaged: a step may take minutes


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

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._shown, self._ended = False, True
            if self._bar is not None:
                self._bar.stop()

    def update(self, phase: str, done: int, total: int) -> None:
        """Record that step ``done`` of ``total`` is about to run, or that all are done."""
        kind = _FIRST_WORD.match(phase)[0]  # type: ignore[index]  # further words are details
        batches = kind in ("auditing", "re-auditing", "measuring")
        what = f"{kind} {self._what}{phase[len(kind) :]}: batch" if batches else f"{phase}:"
        with self._lock:
            is_new, self._phase = kind != self._phase or done < self._done, kind
            self._message, self._done, self._total = escape_control(what), done, total
            if not self._shown:
                return
            if self._bar is not None:
                self._draw(is_new=is_new)
            elif (done < total or not total) and (is_new or time.monotonic() - self._written >= LOG_SECONDS):
                self._log()

    def _show(self) -> None:
        bar = make_bar() if sys.stderr.isatty() else None  # rich is imported before the lock is taken
        with self._lock:
            if self._ended:
                return
            self._shown = True
            if bar is None:
                self._log()
                return
            self._bar = bar
            self._draw(is_new=True)
            bar.start()

    def _draw(self, *, is_new: bool) -> None:
        assert self._bar is not None
        total, left = self._total or None, "left" if self._total else ""
        if is_new or self._task is None:  # the speed of the last phase does not predict that of this one
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(self._message, total=total, completed=self._done, left=left)
            self._bar.advance(self._task, 0)  # starts the measurement of its time
        else:
            self._bar.update(self._task, description=self._message, completed=self._done, total=total)

    def _log(self) -> None:
        count = f" {min(self._done + 1, self._total)} of {self._total}" if self._total else ""
        self._written = time.monotonic()
        sys.stderr.write(f"{self._message}{count} ...\n")
        sys.stderr.flush()


def make_bar(**options: Any) -> Bar:
    """Return a bar that shows steps, the elapsed time and the remaining time."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bar

    name = TextColumn("{task.description}", markup=False)  # a path may look like markup
    left = (TimeRemainingColumn(compact=True), TextColumn("{task.fields[left]}"))
    return Bar(
        SpinnerColumn("line"),
        name,
        BarColumn(24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *left,
        **({"console": Console(stderr=True)} | options),
        speed_estimate_period=_ALL_STEPS,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
