"""Writes files and directories atomically: the old content stays until the new one is complete."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ampaudit.core import interrupts
from ampaudit.core.errors import OutputError
from ampaudit.core.temporary import SUFFIX, directory_beside, file_beside, temporary_directory

__all__ = [
    "check_directory",
    "check_writable",
    "replace_bytes",
    "staged_directory",
    "temporary_directory",
    "write_bytes",
    "write_private",
    "write_text",
]

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>


_REPLACE = "choose another path, or replace it with --force (in Python: force=True)"


def check_writable(path: Path, *, force: bool) -> None:
    """Check before a long run that a file can be written.

    Raises:
        OutputError: the file exists and ``force`` is not set, or its directory is missing or read-only.
    """
    if _is_stream(path):
        return
    if path.exists() and not path.is_file():
        what = "a directory" if path.is_dir() else "a device or a socket"
        raise OutputError(f"{path} is {what}", hint="give -o the path of a file")
    if path.exists() and not force:
        raise OutputError(f"{path} exists", hint=_REPLACE)
    _check_parent(path)


def write_text(path: Path, text: str, *, force: bool) -> None:
    """Write to a temporary file beside the target, flush it to disk, and rename it.

    Raises:
        OutputError: it cannot be written; what was there before is untouched.
    """
    write_bytes(path, text.encode("utf-8"), force=force)


def write_bytes(path: Path, data: bytes, *, force: bool) -> None:
    """Write as ``write_text`` does."""
    check_writable(path, force=force)
    _replace(path, data, lambda target: 0o666 & ~_umask())


def replace_bytes(path: Path, data: bytes) -> None:
    """Replace a file's content atomically, keeping its permissions.

    Raises:
        OutputError: it cannot be written; what was there before is untouched.
    """
    _replace(path, data, lambda target: target.stat().st_mode & 0o7777)


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read, replacing one that is there, also a link.

    Raises:
        OSError: it cannot be written; what was there before is untouched.
    """
    with file_beside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def _is_stream(path: Path) -> bool:
    """Return whether a path names a terminal, ``/dev/null`` or a pipe, which are written to, not replaced."""
    return path.is_char_device() or path.is_fifo()


def _replace(path: Path, data: bytes, mode_of: Callable[[Path], int]) -> None:
    target = path.resolve()
    try:
        if _is_stream(path):
            with path.open("wb") as stream:
                stream.write(data)
            return
        mode = mode_of(target)
        with file_beside(target) as temporary:
            with temporary.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.chmod(mode)
            with interrupts.Committing(path):
                temporary.replace(target)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error


def check_directory(path: Path, *, force: bool, ours: str) -> None:
    """Reject an output directory that cannot or should not be replaced.

    Args:
        path: the directory to be written.
        force: replace one that is there.
        ours: name of a file that marks directories of ours; only these, and empty ones, are replaced.

    Raises:
        OutputError: it exists and may not be replaced, is a link or a file, or has no parent directory.
    """
    if path.is_symlink():
        raise OutputError(f"{path} is a symbolic link", hint="pass the directory itself to -o")
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path} is a file", hint="give -o the path of a directory")
    if path.is_dir() and any(path.iterdir()):
        if not (path / ours).is_file():
            raise OutputError(
                f"{path} is not empty and has no {ours}: it was not written by ampaudit",
                hint="choose another directory; only one that ampaudit wrote can be replaced",
            )
        if not force:
            raise OutputError(f"{path} exists", hint=_REPLACE)
    _check_parent(path)


@contextlib.contextmanager
def staged_directory(path: Path, *, force: bool, ours: str) -> Iterator[Path]:
    """Fill a new directory beside the target while active, and move it into place at the end.

    The swap is one system call where Linux offers it, so that at any moment, also after a crash, the
    target is the whole old directory or the whole new one. If filling fails, the new one is removed; if
    only the swap fails, it is kept. The next writer removes a directory left by a killed process.

    Raises:
        OutputError: see ``check_directory``; or the disk is full or read-only.
    """
    check_directory(path, force=force, ours=ours)
    target = path.resolve()
    try:
        with directory_beside(target) as stage:
            yield stage
            _flush(stage)
            stage.chmod(0o777 & ~_umask())
            try:
                check_directory(path, force=force, ours=ours)  # it may have been created meanwhile
                with interrupts.Committing(path):
                    _swap(stage, target)  # what is then there, the old one, is removed
            except (OSError, OutputError) as error:
                place = stage.rename(stage.with_name(stage.name.removeprefix(".").removesuffix(SUFFIX)))
                refused = error if isinstance(error, OutputError) else _cannot_write(path, error)
                refused.add_note(f"the result is kept in {place}")
                raise refused from error.__cause__
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(target.parent):
            raise  # about something that was read
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> OutputError:
    what = error.strerror or str(error)
    hint = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "choose another path with -o"
    return OutputError(f"cannot write {path}: {what}; nothing was changed", hint=hint)


def _check_parent(path: Path) -> None:
    """Make a temporary file where ``path`` will be, since permissions do not say whether one can."""
    try:
        target = path.resolve()
        if not target.parent.is_dir():
            raise OutputError(f"no such directory: {target.parent}", hint="create it first")
        with file_beside(target):
            return
    except (OSError, RuntimeError) as error:  # the latter for a circle of links
        raise OutputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error


def _swap(stage: Path, target: Path) -> None:
    if not target.exists():
        os.rename(stage, target)
    elif not _exchanged(stage, target):
        old = stage.with_name(f"{stage.name}.old")
        os.rename(target, old)
        try:
            os.rename(stage, target)
        except OSError:
            os.rename(old, target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    _fsync(target.parent)


def _exchanged(first: Path, second: Path) -> bool:
    """Swap two directories in one step; return False if that is unsupported."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    return bool(rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0)


def _flush(directory: Path) -> None:
    for place, _, names in os.walk(directory):
        for name in names:
            _fsync(Path(place) / name)
        _fsync(Path(place))


def _fsync(path: Path) -> None:
    if os.name == "nt":
        return  # directories cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
