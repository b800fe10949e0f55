"""Ends the program on a signal: temporary files and child processes go, and no traceback shows.

A handler that only raises is not enough: Python drops what is raised in a destructor, and code in C does not
see it. So the signal is remembered, nothing is committed after it, and a thread that the signal wakes ends
the process if the exception has not ended the command within a second.

This applies to the program; for those who import the library, ``install`` is not called and nothing changes.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would delay the handlers
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType
    from typing import NoReturn

__all__ = [
    "INTERRUPTED",
    "Committing",
    "Deferred",
    "Released",
    "at_end",
    "deliver_anyway",
    "explained_by",
    "forget",
    "install",
    "leave",
]

INTERRUPTED = 130
_GRACE_SECONDS = 1.0  # for the exception to end the command
_COMMIT_SECONDS = 10.0  # for a rename or a removal
_EXPLAIN_SECONDS = 3.0  # to find out why somebody else ended the program
_WORDS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "hung up"}


class _Program:
    """The state of the running program."""

    def __init__(self) -> None:
        self.process: int | None = None  # whose signals are handled
        self.signal: int | None = None  # the first that came
        self.deferred = 0  # regions that no exception may leave half-way
        self.finishing = False
        self.ending = _thread.allocate_lock()  # taken by the thread that ends the program
        self.delivers = False  # results are delivered in spite of the signal
        self.stderr, self.null = 2, -1  # what file descriptor 2 is, and what it is after a signal
        self.written: list[str] = []
        self.cleanups: list[Callable[[], object]] = []
        self.explain: Callable[[], str] | None = None


_program = _Program()


def install() -> None:
    """Handle SIGINT, SIGTERM and SIGHUP, unless the caller ignores them as ``nohup`` does."""
    _program.process = os.getpid()
    _program.stderr, _program.null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    for number in _handled():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)
    hook = sys.unraisablehook
    sys.unraisablehook = lambda dropped: None if _program.signal is not None else hook(dropped)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_restore_defaults)
        _start_watching()


def at_end(cleanup: Callable[[], object]) -> None:
    """Call a function if a signal ends the program: more than once, and from any thread."""
    _program.cleanups.append(cleanup)


def explained_by(explain: Callable[[], str]) -> None:
    """Call a function for why somebody else has sent the signal, in words that follow a comma, or none."""
    _program.explain = explain


def forget(cleanup: Callable[[], object]) -> None:
    """Undo ``at_end``, if it was called."""
    if cleanup in _program.cleanups:
        _program.cleanups.remove(cleanup)


def deliver_anyway() -> None:
    """Keep what is finished: deliver results in spite of the signal."""
    if _program.signal is not None:
        _program.delivers = True
        os.dup2(_program.stderr, 2)


class Deferred:
    """Delays the exception of a signal to the end of the block."""

    def __enter__(self) -> None:
        _program.deferred += _in_main_thread()

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        del kind
        _program.deferred -= _in_main_thread()
        if not _program.deferred and _is_pending():
            raise KeyboardInterrupt


class Released:
    """Handles signals as Python does by itself, for a script that runs in this process."""

    def __enter__(self) -> None:
        self._ours = [n for n in _handled() if _in_main_thread() and signal.getsignal(n) is _handle]
        self._wakeup = signal.set_wakeup_fd(-1) if self._ours else -1
        for number in self._ours:
            signal.signal(number, _default(number))

    def __exit__(self, *_: object) -> None:
        for number in self._ours:
            signal.signal(number, _handle)
        if self._ours:
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)


class Committing(Deferred):
    """Puts a result in place: wholly, and not after a signal."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        super().__enter__()
        if _is_pending():
            _program.deferred -= 1
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if kind is None and _program.process is not None:
            _program.written.append(str(self._path))
        super().__exit__()


def leave(code: int) -> NoReturn:
    """End the program, with the code of the signal if there was one.

    Python's own end takes tenths of a second, in which a signal shows a traceback or kills. So, as in
    ``multiprocessing``, threads are joined, exit functions called, and the rest is left to the system.
    """
    import atexit
    import threading

    _program.finishing = True
    if _program.signal is None and code != INTERRUPTED:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _tried(sys.stdout.flush)
        _tried(sys.stderr.flush)
        if _program.signal is None:
            os._exit(code)
    _end(atexit._run_exitfuncs)


def _handled() -> list[int]:
    return [getattr(signal, name) for name in _WORDS if hasattr(signal, name)]


def _in_main_thread() -> bool:
    import threading

    return _program.process is not None and threading.current_thread() is threading.main_thread()


def _is_pending() -> bool:
    return _program.signal is not None and not _program.delivers and _in_main_thread()


def _handle(number: int, frame: FrameType | None) -> None:
    del frame
    first, _program.signal = _program.signal is None, _program.signal or number
    if _program.ending.locked():
        return
    _mute()
    if _program.deferred:
        return
    if not first or _program.finishing:
        _end()
    raise KeyboardInterrupt


def _start_watching() -> None:
    import threading

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="ampaudit-signals", daemon=True).start()


def _watch(reader: int) -> None:
    """End the program at a second signal, or if the exception of the first has not done so in time."""
    import select
    import time

    while True:
        number = os.read(reader, 1)[0]
        if number not in _handled():
            continue  # the model's code handles it
        start, again = time.monotonic(), _program.delivers
        while time.monotonic() - start < (_COMMIT_SECONDS if _program.deferred else _GRACE_SECONDS):
            if select.select([reader], [], [], 0.02)[0]:
                again |= os.read(reader, 1)[0] in _handled()
            if (again or _program.delivers) and not _program.deferred:
                break
        if again or not _program.delivers:
            _program.signal = _program.signal or number
            _end()


def _end(finish: Callable[[], object] = lambda: None) -> NoReturn:
    """Clean up, say what was written, and exit."""
    if not _program.ending.acquire(blocking=False):  # another thread does
        import time

        time.sleep(_COMMIT_SECONDS)
        _say_and_exit()
    if _program.delivers:
        _tried(sys.stdout.flush)
    # twice, as another thread may still make what is to be cleaned up
    for step in (_mute, _clean_up, _kill_children, finish, _clean_up):
        _tried(step)
    _say_and_exit()


def _say_and_exit() -> NoReturn:
    number, written = _program.signal or signal.SIGINT, _program.written
    what = "nothing was" if not written else f"{len(written)} files were"
    what = f"{written[0]} was" if len(written) == 1 else what
    line = f"ampaudit: {_WORDS[signal.Signals(number).name]}{_explanation()}; {what} written"
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    if "rich.live" in sys.modules and os.isatty(_program.stderr):
        line = f"\r\x1b[K\x1b[?25h{line}"  # remove the progress bar, and show the cursor that it hid
    encoding = getattr(sys.__stderr__, "encoding", None) or "utf-8"  # sys.stderr may be redirected
    _tried(lambda: os.write(_program.stderr, f"{line}\n".encode(encoding, "backslashreplace")))
    os._exit(128 + number)


def _explanation() -> str:
    """Return why the signal was sent, if that is found out in time."""
    import threading

    found, explain = list[str](), _program.explain
    if explain is None:
        return ""
    asking = threading.Thread(target=lambda: _tried(lambda: found.append(explain())), daemon=True)
    _tried(asking.start)
    _tried(lambda: asking.join(_EXPLAIN_SECONDS))
    return f", {found[0]}" if found and found[0] else ""


def _clean_up() -> None:
    for cleanup in reversed(_program.cleanups[:]):
        _tried(cleanup)


def _kill_children() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        _tried(child.kill)


def _tried(action: Callable[[], object]) -> None:
    """Call a function whose failure must not keep the program from ending."""
    try:
        action()
    except BaseException:
        return


def _mute() -> None:
    """Drop what libraries write to stderr about an exception that they do not expect."""
    os.dup2(_program.null, 2)


def _restore_defaults() -> None:
    """Leave the signals of a forked child to its own code."""
    _program.process = None
    _program.cleanups.clear()
    signal.set_wakeup_fd(-1)
    for number in _handled():
        if signal.getsignal(number) is _handle:
            signal.signal(number, _default(number))


def _default(number: int) -> Callable[[int, FrameType | None], object] | signal.Handlers:
    """Return Python's own handler of a signal."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
