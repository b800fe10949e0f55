"""Makes temporary files and directories, of which nothing is left, also after a kill."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from ampaudit.core import interrupts
from ampaudit.core.locks import locked

__all__ = ["SUFFIX", "directory_beside", "file_beside", "temporary_directory"]

SUFFIX = ".tmp"
_OURS = "ampaudit-"  # in the system's folder, only names that begin and end so are removed
_MAX_ATTEMPTS = 5  # against another process or thread that does something to the same directory


@contextlib.contextmanager
def temporary_directory(prefix: str) -> Iterator[Path]:
    """Create a directory in the system's temporary folder, which is removed at the end.

    It is removed also if a signal ends the program. If nothing can, as after SIGKILL, the next command of
    this user that makes such a directory removes it; so does a process whose child was killed.

    Args:
        prefix: of its name, beginning with ``ampaudit-``.

    Raises:
        OSError: it cannot be created.
    """
    folder = Path(tempfile.gettempdir())
    try:
        with _temporary(tempfile.mkdtemp, folder, prefix, leftovers=_OURS) as directory:
            yield directory
    finally:
        _remove_leftovers(folder, _OURS)


def file_beside(target: Path) -> AbstractContextManager[Path]:
    """Create an empty file, which is removed if it is still there at the end.

    The next one beside the same target removes one that a killed process has left.

    Raises:
        OSError: it cannot be created.
    """
    return _temporary(_make_file, target.parent, f".{target.name}.")


def directory_beside(target: Path) -> AbstractContextManager[Path]:
    """Create a directory as ``file_beside`` does a file."""
    return _temporary(tempfile.mkdtemp, target.parent, f".{target.name}.part-")


@contextlib.contextmanager
def _temporary(
    make: Callable[..., str], parent: Path, prefix: str, leftovers: str | None = None
) -> Iterator[Path]:
    """Create a file or directory that is locked while this process lives, and remove it at the end.

    First, those whose maker has died are removed. A rival may remove this one before it is locked, and then
    another is created.

    Args:
        make: creates it, as ``tempfile.mkdtemp`` does.
        parent: where.
        prefix: of its name.
        leftovers: prefix of the names of those that are removed, if it is another.
    """
    _remove_leftovers(parent, leftovers or prefix)
    create = partial(make, suffix=SUFFIX, prefix=prefix, dir=parent)
    with contextlib.ExitStack() as stack:
        for _ in range(_MAX_ATTEMPTS):
            path = stack.enter_context(_removed_at_end(create))
            release = locked(path)
            if release is not None:
                stack.callback(release)
                if path.exists():
                    break
        yield path


@contextlib.contextmanager
def _removed_at_end(make: Callable[[], str]) -> Iterator[Path]:
    with interrupts.Deferred():
        path = Path(make())
        remove = partial(_remove, path)
        interrupts.at_end(remove)
    try:
        yield path
    finally:
        with interrupts.Deferred():
            interrupts.forget(remove)
            remove()


def _make_file(suffix: str, prefix: str, dir: Path) -> str:
    handle, name = tempfile.mkstemp(suffix, prefix, dir)
    os.close(handle)
    return name


def _remove(path: Path) -> None:
    for _ in range(_MAX_ATTEMPTS):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
        if not path.exists():
            return


def _remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove temporary files and directories whose maker has died, which releases their locks."""
    with contextlib.suppress(OSError):  # a folder may be writable and not readable
        for name in os.listdir(parent):
            path = parent / name
            ours = name.startswith(prefix) and name.endswith(SUFFIX) and _is_own(path)
            if ours and (release := locked(path)) is not None:
                _remove(path)
                release()


def _is_own(path: Path) -> bool:
    """Return whether it is a file or directory of this user, and no link."""
    try:
        found = path.lstat()
    except OSError:  # somebody else has removed it
        return False
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        return False
    return not hasattr(os, "getuid") or found.st_uid == os.getuid()
