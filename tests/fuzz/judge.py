"""Judges what a command does with an input: it accepts it or refuses it, and does nothing else.

Anything but success or an ``AuditError`` is a defect, and so is an import, a process, a connection or a
file outside of the scratch folder, a message that is long or not printable, and more than 20 s or 2 GB.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click

from ampaudit.core.errors import AuditError
from tests.fuzz.mutators import CANARY, Files

SECONDS = 20  # of the processor, so that a busy machine does not decide
PATIENCE = 120  # seconds until what waits is called a hang
MEMORY = 2 << 30
_MESSAGE = 300  # characters
_CHANGES = frozenset(
    {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate"}
)
_STARTS = frozenset(
    "subprocess.Popen os.system os.exec os.posix_spawn os.spawn pty.spawn socket.connect socket.bind "
    "socket.getaddrinfo webbrowser.open urllib.Request".split()
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one input: ``accepted``, ``refused`` or ``defect``, and what was said or done."""

    outcome: str
    detail: str = ""
    exit_code: int = 0


class _Hang(BaseException):
    pass


class _Watch:
    """Records forbidden events while ``scratch`` is set; an audit hook cannot be removed again."""

    def __init__(self) -> None:
        self.scratch: str | None = None
        self.seen: list[str] = []

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if self.scratch is None:
            return
        if event in _STARTS and not _is_ours(args):
            self.seen.append(f"{event} {str(args)[:80]}")
        elif event in _CHANGES:
            paths = [arg for arg in args if isinstance(arg, str | bytes)][: 2 if event == "os.rename" else 1]
            self.seen += [f"{event} {path!r}" for path in paths if self._is_outside(path)]
        elif event == "open" and isinstance(args[0], str | bytes):
            if isinstance(args[2], int) and args[2] & _WRITES and self._is_outside(args[0]):
                self.seen.append(f"open {args[0]!r} for writing")
        elif event == "import" and args[0].partition(".")[0] == CANARY:
            self.seen.append(f"import {args[0]}")
        elif event == "exec" and self._is_foreign(args[0]):
            self.seen.append(f"exec {args[0]}")
        elif event == "pickle.find_class" and str(args[0]).partition(".")[0] in (CANARY, "os", "posix", "nt"):
            self.seen.append(f"pickle.find_class {args}")

    def _is_outside(self, path: str | bytes) -> bool:
        text = os.path.abspath(os.fsdecode(path))
        ours = text.startswith(f"{self.scratch}/") or text in (self.scratch, os.devnull)
        return not ours and "/torchinductor_" not in text  # torch makes that folder when it traces

    def _is_foreign(self, code: Any) -> bool:
        """Return whether code comes from the scratch folder, or is an expression that was planted."""
        file = getattr(code, "co_filename", "")
        planted = "__import__" in code.co_names and CANARY in code.co_consts
        return planted or (os.path.isabs(file) and not self._is_outside(file))


_WATCH = _Watch()


def _is_ours(args: tuple[Any, ...]) -> bool:
    """Return whether a process is a worker of ampaudit, which its own modules start."""
    command = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return bool(command) and command[0] == sys.executable and any("ampaudit" in str(part) for part in command)


def write_files(folder: Path, files: Files) -> None:
    """Write an input into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(data, bytes):
            path.write_bytes(data)
        elif data.kind == "directory":
            path.mkdir()
        elif data.kind == "link":
            path.symlink_to(data.target)
        else:
            os.mkfifo(path)


def judge(files: Files, read: Callable[[], tuple[str, int]], *, keep: Path | None = None) -> Verdict:
    """Read an input in a scratch folder, which is the current one meanwhile.

    Args:
        files: the input.
        read: runs a command on it; returns what was printed and the exit code.
        keep: where the files go if there is a defect.
    """
    _watch_once()
    with _scratch_folder() as folder:
        write_files(folder, files)
        before = _peak()
        _WATCH.seen.clear()
        with _limits(), _observed(folder):
            verdict = _outcome(read)
        if verdict.outcome != "defect" and _WATCH.seen:
            verdict = Verdict("defect", f"did: {'; '.join(dict.fromkeys(_WATCH.seen))}")
        if verdict.outcome != "defect" and _peak() - before > MEMORY:
            verdict = Verdict("defect", f"took {(_peak() - before) >> 20} MiB")
    if verdict.outcome == "defect" and keep is not None:
        shutil.rmtree(keep, ignore_errors=True)
        write_files(keep, files)
    return verdict


@cache
def _watch_once() -> None:
    sys.addaudithook(_WATCH)


def _outcome(read: Callable[[], tuple[str, int]]) -> Verdict:
    try:
        printed, code = read()
    except AuditError as error:
        text = f"{error.args[0]}\n{error.hint}"
        long = next((part for part in (error.args[0], error.hint) if len(part) > _MESSAGE), None)
        if long is not None:
            return Verdict("defect", f"message of {len(long)} characters: {long[:200]!r}")
        raw = _unprintable(error.args[0]) or _unprintable(error.hint)
        return (
            Verdict("defect", f"message with {raw!r}: {text!r}")
            if raw
            else Verdict("refused", text, error.exit_code)
        )
    except click.ClickException as error:
        return Verdict("refused", error.format_message(), error.exit_code)
    except _Hang:
        return Verdict("defect", f"took more than {SECONDS} s, or waited, at {_place(sys.exception())}")
    except BaseException as error:  # a SystemExit or a KeyboardInterrupt is none of ours either
        return Verdict("defect", f"{type(error).__name__} at {_place(error)}: {str(error)[:200]}")
    raw = _unprintable(printed.replace("\n", ""))
    if raw:
        return Verdict("defect", f"printed {raw!r}")
    return Verdict("accepted" if code < 2 else "refused", exit_code=code)


def _place(error: BaseException | None) -> str:
    """Name the innermost line of ampaudit, or else of anything."""
    frames = traceback.extract_tb(error.__traceback__) if error else []
    own = [f for f in frames if "/ampaudit/" in f.filename] or list(frames)
    return f"{own[-1].filename.rpartition('/ampaudit/')[2]}:{own[-1].lineno}" if own else "?"


def _unprintable(text: str) -> str:
    return next((c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")), "")


@contextlib.contextmanager
def _scratch_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-")).resolve()
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _observed(folder: Path) -> Iterator[None]:
    """Watch events, with temporary files in the folder, no byte code written, and warnings off."""
    temporary, bytecode = tempfile.tempdir, sys.dont_write_bytecode
    tempfile.tempdir, sys.dont_write_bytecode = str(folder), True
    _WATCH.scratch = str(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _WATCH.scratch = None
        tempfile.tempdir, sys.dont_write_bytecode = temporary, bytecode


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Interrupt Python after the time allowed, and refuse the process more than twice the memory."""

    def interrupt(*_: object) -> None:
        raise _Hang

    timers = {signal.SIGPROF: (signal.ITIMER_PROF, SECONDS), signal.SIGALRM: (signal.ITIMER_REAL, PATIENCE)}
    before = {number: signal.signal(number, interrupt) for number in timers}
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2 * MEMORY, limits[1]))
    for timer, seconds in timers.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, (timer, _) in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])
        resource.setrlimit(resource.RLIMIT_AS, limits)
