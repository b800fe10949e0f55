"""Locks a file or directory while the process that fills it lives."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

__all__ = ["locked"]

_LOCKS_DIRECTORIES = os.name != "nt"  # Windows opens no directories


def locked(path: Path) -> Callable[[], None] | None:
    """Lock a file or directory while its writer lives, and return what releases it.

    ``None`` if it is gone, locked, or cannot be locked.
    """
    if not _LOCKS_DIRECTORIES:
        return _locked_by_file(path)
    import fcntl

    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return partial(os.close, handle)


def _locked_by_file(path: Path) -> Callable[[], None] | None:
    """Lock a file beside it that stands for it."""
    from filelock import FileLock, Timeout

    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError):
        return None

    def release() -> None:
        lock.release()
        with contextlib.suppress(OSError):
            Path(lock.lock_file).unlink(missing_ok=True)

    return release
