"""Says on stderr what is going on, once it has taken two seconds."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

__all__ = ["Progress"]

PATIENCE_SECONDS = 2.0
LOG_SECONDS = 5.0


class Progress:
    """A status line on a terminal, a plain line elsewhere; silent for short runs."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._message = f"loading {what}"
        self._phase, self._written = "", 0.0
        self._shown = threading.Event()
        self._lock = threading.Lock()
        self._timer = threading.Timer(PATIENCE_SECONDS, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Progress:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            if self._shown.is_set() and sys.stderr.isatty():
                sys.stderr.write("\r\x1b[2K")
                sys.stderr.flush()

    def update(self, phase: str, done: int, total: int) -> None:
        """Batch, or try, ``done`` of ``total`` is about to run (or all are done)."""
        what = f"{phase} {self._what}: batch" if phase.startswith(("auditing", "measuring")) else f"{phase}:"
        self._message = f"{what} {min(done + 1, total)} of {total}"
        if self._shown.is_set() and done < total and self._due(phase):
            self._write()

    def _due(self, phase: str) -> bool:
        """Whether to say so: a log gets a line per phase, and then one every few seconds."""
        now = time.monotonic()
        if sys.stderr.isatty() or phase != self._phase or now - self._written >= LOG_SECONDS:
            self._phase, self._written = phase, now
            return True
        return False

    def _show(self) -> None:
        self._shown.set()
        self._write()

    def _write(self) -> None:
        message = "".join(c if c.isprintable() else "?" for c in self._message)
        with self._lock:
            if sys.stderr.isatty():
                sys.stderr.write(f"\r\x1b[2K{message} ...")
            else:
                sys.stderr.write(f"{message} ...\n")
            sys.stderr.flush()
