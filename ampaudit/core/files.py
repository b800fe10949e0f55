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
from functools import partial
from pathlib import Path

from ampaudit.core import interrupts
from ampaudit.core.errors import OutputError, SourceError

_LOCKS_DIRECTORIES = os.name != "nt"  # Windows cannot open directories
SUFFIX = ".tmp"
_OURS = "ampaudit-"  # prefix of the leftovers that are removed from the system's temporary folder
_MAX_ATTEMPTS = 5  # if another process or thread interferes
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # <fcntl.h>, <linux/fs.h>
_MODEL_FILES = (".onnx", ".safetensors", ".pt", ".pth", ".pt2", ".bin", ".ckpt")
_REPLACE = "choose another path, or replace it with --force (in Python: force=True)"


def check_writable(path: Path, *, force: bool) -> None:
    """Check before a long run that a file can be written.

    Raises:
        OutputError: The file exists and ``force`` is not set, or its directory is missing or read-only.
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
    """Write a text file atomically: a temporary file beside the target is flushed to disk and renamed.

    Raises:
        OutputError: The file cannot be written; the old one is untouched.
    """
    write_bytes(path, text.encode("utf-8"), force=force)


def write_bytes(path: Path, data: bytes, *, force: bool) -> None:
    """Write a binary file atomically; see ``write_text``."""
    check_writable(path, force=force)
    replace_bytes(path, data, 0o666 & ~_umask())


def replace_bytes(path: Path, data: bytes, mode: int | None = None) -> None:
    """Replace a file's content atomically, keeping its permissions unless others are given.

    Raises:
        OutputError: The file cannot be written; the old one is untouched.
    """
    target = path.resolve()
    try:
        if _is_stream(path):
            with path.open("wb") as stream:
                stream.write(data)
            return
        if mode is None:
            mode = target.stat().st_mode & 0o7777
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


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user may read, replacing an existing file or link.

    Raises:
        OSError: The file cannot be written; the old one is untouched.
    """
    with file_beside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def _is_stream(path: Path) -> bool:
    """Return whether a path is a terminal, ``/dev/null`` or a pipe, which are written to and not replaced."""
    return path.is_char_device() or path.is_fifo()


def check_directory(path: Path, *, force: bool, marker: str) -> None:
    """Reject an output directory that cannot or should not be replaced.

    The file ``marker`` marks directories written by ampaudit. With ``force``, these are replaced; without it,
    only empty ones.

    Raises:
        OutputError: The path exists and may not be replaced, is a link, a file or named like one, or has no
            parent directory.
    """
    if path.is_symlink():
        raise OutputError(f"{path} is a symbolic link", hint="pass the directory itself to -o")
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path} is a file", hint="give -o the path of a directory")
    if path.suffix in _MODEL_FILES and not path.exists():
        raise OutputError(f"{path} looks like a file", hint=f"-o takes a directory, such as {path.stem}")
    if path.is_dir() and any(path.iterdir()):
        if not (path / marker).is_file():
            raise OutputError(
                f"{path} is not empty and has no {marker}: it was not written by ampaudit",
                hint="choose another directory; only one that ampaudit wrote can be replaced",
            )
        if not force:
            raise OutputError(f"{path} exists", hint=_REPLACE)
    _check_parent(path)


@contextlib.contextmanager
def staged_directory(path: Path, *, force: bool, marker: str) -> Iterator[Path]:
    """Yield a new directory beside the target, and move it into place at the end.

    On Linux the swap is one system call, so that at any moment, even after a crash, the target is the whole
    old directory or the whole new one. If filling fails, the new one is removed; if only the swap fails, it
    is kept. The next writer removes a directory left by a killed process.

    Raises:
        OutputError: The directory may not be written (see ``check_directory``), or the disk is full.
    """
    check_directory(path, force=force, marker=marker)
    target = path.resolve()
    try:
        with _temporary(tempfile.mkdtemp, target.parent, f".{target.name}.part-") as stage:
            yield stage
            _flush(stage)
            stage.chmod(0o777 & ~_umask())
            try:
                check_directory(path, force=force, marker=marker)  # another process may have created it
                with interrupts.Committing(path):
                    _swap(stage, target)  # stage is then the old one, which is removed
            except (OSError, OutputError) as error:
                place = stage.rename(stage.with_name(stage.name.removeprefix(".").removesuffix(SUFFIX)))
                refused = error if isinstance(error, OutputError) else _cannot_write(path, error)
                refused.add_note(f"the result is kept in {place}")
                raise refused from error.__cause__
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(target.parent):
            raise  # an error of the caller, from reading another file
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: OSError) -> OutputError:
    what = error.strerror or str(error)
    hint = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "choose another path with -o"
    return OutputError(f"cannot write {path}: {what}; nothing was changed", hint=hint)


def _check_parent(path: Path) -> None:
    """Check that a file can be created beside ``path``, by creating one: permissions are not enough."""
    try:
        target = path.resolve()
        if not target.parent.is_dir():
            raise OutputError(f"no such directory: {target.parent}", hint="create it first")
        with file_beside(target):
            return
    except (OSError, RuntimeError) as error:  # RuntimeError: a cycle of links
        raise OutputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error


def _swap(stage: Path, target: Path) -> None:
    if not target.exists():
        os.rename(stage, target)
    elif not _exchange(stage, target):
        old = stage.with_name(f"{stage.name}.old")
        os.rename(target, old)
        try:
            os.rename(stage, target)
        except OSError:
            os.rename(old, target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    _fsync(target.parent)


def _exchange(first: Path, second: Path) -> bool:
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
    """Yield a new directory in the system's temporary folder, and remove it at the end.

    It is also removed if a signal ends the program. A directory of a killed process is recognized by the
    prefix ``ampaudit-``, and removed by its parent, or by the next command of this user that creates one.

    Raises:
        OSError: The directory cannot be created.
    """
    folder = Path(tempfile.gettempdir())
    try:
        with _temporary(tempfile.mkdtemp, folder, prefix, leftovers=_OURS) as directory:
            yield directory
    finally:
        _remove_leftovers(folder, _OURS)


def file_beside(target: Path) -> AbstractContextManager[Path]:
    """Yield a new empty file beside a target, and remove it at the end unless it was renamed.

    The next call for the same target removes a file left by a killed process.

    Raises:
        OSError: The file cannot be created.
    """
    return _temporary(_make_file, target.parent, f".{target.name}.")


@contextlib.contextmanager
def _temporary(
    make: Callable[..., str], parent: Path, prefix: str, leftovers: str | None = None
) -> Iterator[Path]:
    """Yield a new file or directory, locked while this process lives, and remove it at the end.

    Leftovers of dead processes are removed first. Another process may take the new one for a leftover before
    it is locked; then the next attempt creates another. ``make`` takes the arguments of ``tempfile.mkdtemp``;
    ``leftovers`` is the prefix of the names to remove, by default ``prefix``.
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
    """Remove temporary files and directories of dead processes, whose locks are released."""
    with contextlib.suppress(OSError):  # a folder may be writable but not readable
        for name in os.listdir(parent):
            path = parent / name
            leftover = name.startswith(prefix) and name.endswith(SUFFIX) and _is_own_file(path)
            if leftover and (release := locked(path)) is not None:
                _remove(path)
                release()


def _is_own_file(path: Path) -> bool:
    """Return whether a path is a file or directory of this user, not a link."""
    try:
        status = path.lstat()
    except OSError:  # another process has removed it
        return False
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        return False
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


def locked(path: Path) -> Callable[[], None] | None:
    """Lock a file or directory and return a function that releases it.

    The lock ends with the process. Returns ``None`` if the path is missing or cannot be locked.
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
    """Lock ``<path>.lock`` in place of a directory, which Windows cannot lock."""
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


# a file with its identity and version, which changes if it is replaced or written; None: no such file
FileState = tuple[Path, tuple[int, ...] | None]


def states_of(paths: Iterable[Path]) -> tuple[FileState, ...]:
    """Return the states of files, and of the files in directories."""
    return tuple((file, _identity(file)) for path in paths for file in _files(path))


def check_unchanged(states: Iterable[FileState]) -> None:
    """Check that files are still in these states.

    Raises:
        SourceError: A file was replaced, written or removed.
    """
    for path, identity in states:
        if _identity(path) != identity:
            raise SourceError(f"{path} changed while it was read", hint="run again when it is complete")


def _files(path: Path) -> Iterable[Path]:
    """Yield a file, or all files of a directory; an index of shards stands for its directory."""
    directory = path.parent if path.name.endswith(".index.json") else path
    if not directory.is_dir():
        yield path
        return
    for parent, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if not name.startswith(".")]
        yield from (Path(parent) / name for name in names if not name.startswith("."))


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
