"""Writes files and directories atomically: the old content stays until the new one is complete."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ampaudit.core import interrupts
from ampaudit.core.errors import OutputError, SourceError

__all__ = [
    "FileState",
    "check_directory",
    "check_unchanged",
    "check_writable",
    "replace_bytes",
    "staged_directory",
    "states_of",
    "temporary_directory",
    "write_bytes",
    "write_private",
    "write_text",
]

_LOCKS_DIRECTORIES = os.name != "nt"  # Windows opens no directories
SUFFIX = ".tmp"
_OURS = "ampaudit-"  # in the system's folder, only names that begin and end so are removed
_MAX_ATTEMPTS = 5  # against another process or thread that does something to the same directory
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
