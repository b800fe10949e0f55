"""Notices that files change while a command reads them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ampaudit.core.errors import SourceError

__all__ = ["FileState", "check_unchanged", "states_of"]


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells a file from another one at its path, and from itself before a write."""

    path: Path
    identity: tuple[int, ...] | None  # None: there is no such file


def states_of(paths: Iterable[Path]) -> tuple[FileState, ...]:
    """Return the states of files, and of the files in directories."""
    return tuple(FileState(file, _identity(file)) for path in paths for file in _files(path))


def check_unchanged(states: Iterable[FileState]) -> None:
    """Compare states with those of now.

    Raises:
        SourceError: a file was replaced, written or removed.
    """
    for state in states:
        if _identity(state.path) != state.identity:
            raise SourceError(f"{state.path} changed while it was read", hint="run again when it is complete")


def _files(path: Path) -> Iterable[Path]:
    """Yield a file, or the files of a directory; an index of shards counts for its directory."""
    directory = path.parent if path.name.endswith(".index.json") else path
    if not directory.is_dir():
        yield path
        return
    for parent, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if not name.startswith(".")]
        yield from (Path(parent) / name for name in names if not name.startswith("."))


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
