"""Writes a file so that it is either the old one or the whole new one, never a part."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from ampaudit.errors import OutputError

__all__ = ["check_writable", "write_text"]


def check_writable(path: Path, *, force: bool) -> None:
    """Refuse early what would fail after a long run.

    Raises:
        OutputError: the file exists and ``force`` is not set, or its directory is missing.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a directory", hint="give -o the path of a file")
    if path.exists() and not force:
        raise OutputError(f"{path} exists", hint="choose another path, or pass --force to replace it")
    if not path.resolve().parent.is_dir():
        raise OutputError(f"no such directory: {path.resolve().parent}", hint="create it first")


def write_text(path: Path, text: str, *, force: bool) -> None:
    """Write to a temporary file beside the target, flush it to disk, and rename it.

    Raises:
        OutputError: it cannot be written; what was there before is untouched.
    """
    check_writable(path, force=force)
    target = path.resolve()
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
