"""Ends the program on a signal: removes temporary files, kills child processes, and shows no traceback.

A handler that only raises is not enough: Python drops exceptions raised in a destructor, and C code does not
see them. So the signal is stored, nothing is committed after it, and a thread that the signal wakes ends the
process if the exception has not ended the command within a second.

This applies to the program only: the library never calls ``install``.
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

INTERRUPTED = 130
_GRACE_SECONDS = 1.0  # for the exception to end the command
_COMMIT_SECONDS = 10.0  # for a rename or a removal
_EXPLAIN_SECONDS = 3.0  # to find out why another process sent the signal
_WORDS = {"SIGINT": "interrupted", "SIGTERM": "terminated", "SIGHUP": "hung up"}


class _Program:
    """The state of the running program."""

    def __init__(self) -> None:
        self.process: int | None = None  # id of the process that handles signals
        self.signal: int | None = None  # the first one received
        self.deferred = 0  # nested regions that no exception may interrupt
        self.finishing = False
        self.ending = _thread.allocate_lock()  # held by the thread that ends the program
        self.delivers = False  # whether finished results are delivered despite the signal
        self.stderr, self.null = 2, -1  # copy of file descriptor 2, and its replacement after a signal
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
        import threading

        os.register_at_fork(after_in_child=_restore_defaults)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=_watch, args=(reader,), name="ampaudit-signals", daemon=True).start()


def at_end(cleanup: Callable[[], object]) -> None:
    """Register a function to call if a signal ends the program, possibly twice and from any thread."""
    _program.cleanups.append(cleanup)


def explained_by(explain: Callable[[], str]) -> None:
    """Register a function that explains the signal: a clause to follow a comma, or an empty string."""
    _program.explain = explain


def forget(cleanup: Callable[[], object]) -> None:
    """Undo ``at_end``."""
    if cleanup in _program.cleanups:
        _program.cleanups.remove(cleanup)


def deliver_anyway() -> None:
    """Deliver the finished results despite the signal."""
    if _program.signal is not None:
        _program.delivers = True
        os.dup2(_program.stderr, 2)


class Deferred:
    """Delays a signal's exception to the end of the block."""

    def __enter__(self) -> None:
        _program.deferred += _in_main_thread()

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        _program.deferred -= _in_main_thread()
        if not _program.deferred and _is_pending():
            raise KeyboardInterrupt


class Released:
    """Restores Python's signal handlers for a script that runs in this process."""

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
    """Guards the commit of a result: completed once begun, and not begun after a signal."""

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
    """End the program with this exit code, or with that of a signal.

    Python's own shutdown takes tenths of a second, in which a signal shows a traceback or kills. So, as in
    ``multiprocessing``, threads are joined, exit functions called, and the rest is left to the system.
    """
    import atexit
    import threading

    _program.finishing = True
    if _program.signal is None and code != INTERRUPTED:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _attempt(sys.stdout.flush)
        _attempt(sys.stderr.flush)
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
    first, _program.signal = _program.signal is None, _program.signal or number
    if _program.ending.locked():
        return
    _mute()
    if _program.deferred:
        return
    if not first or _program.finishing:
        _end()
    raise KeyboardInterrupt


def _watch(reader: int) -> None:
    """End the program at a second signal, or if the exception of the first has not done so in time."""
    import select
    import time

    while True:
        number = os.read(reader, 1)[0]
        if number not in _handled():
            continue  # a signal that the model's code handles
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
    """Clean up, report what was written, and exit."""
    if not _program.ending.acquire(blocking=False):  # another thread is ending the program
        import time

        time.sleep(_COMMIT_SECONDS)
        _report_and_exit()
    if _program.delivers:
        _attempt(sys.stdout.flush)
    # clean up twice: another thread may still create files
    for step in (_mute, _clean_up, _kill_children, finish, _clean_up):
        _attempt(step)
    _report_and_exit()


def _report_and_exit() -> NoReturn:
    number, paths = _program.signal or signal.SIGINT, _program.written
    what = "nothing was" if not paths else f"{len(paths)} files were"
    what = f"{paths[0]} was" if len(paths) == 1 else what
    line = f"ampaudit: {_WORDS[signal.Signals(number).name]}{_explanation()}; {what} written"
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    if "rich.live" in sys.modules and os.isatty(_program.stderr):
        line = f"\r\x1b[K\x1b[?25h{line}"  # remove the progress bar, and show the cursor that it hid
    encoding = getattr(sys.__stderr__, "encoding", None) or "utf-8"  # sys.stderr may be redirected
    _attempt(lambda: os.write(_program.stderr, f"{line}\n".encode(encoding, "backslashreplace")))
    os._exit(128 + number)


def _explanation() -> str:
    """Return the explanation of the signal, if it comes in time."""
    import threading

    answers, explain = list[str](), _program.explain
    if explain is None:
        return ""
    thread = threading.Thread(target=lambda: _attempt(lambda: answers.append(explain())), daemon=True)
    _attempt(thread.start)
    _attempt(lambda: thread.join(_EXPLAIN_SECONDS))
    return f", {answers[0]}" if answers and answers[0] else ""


def _clean_up() -> None:
    for cleanup in reversed(_program.cleanups[:]):
        _attempt(cleanup)


def _kill_children() -> None:
    import psutil

    for child in psutil.Process().children(recursive=True):
        _attempt(child.kill)


def _attempt(action: Callable[[], object]) -> None:
    """Call a function and ignore its failure, which must not keep the program from ending."""
    try:
        action()
    except BaseException:
        return


def _mute() -> None:
    """Discard stderr, where libraries would report the unexpected exception."""
    os.dup2(_program.null, 2)


def _restore_defaults() -> None:
    """Restore Python's handlers in a forked child."""
    _program.process = None
    _program.cleanups.clear()
    signal.set_wakeup_fd(-1)
    for number in _handled():
        if signal.getsignal(number) is _handle:
            signal.signal(number, _default(number))


def _default(number: int) -> Callable[[int, FrameType | None], object] | signal.Handlers:
    """Return Python's default handler of a signal."""
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
