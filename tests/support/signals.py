"""Programs ended by a signal, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_MARK = "AMPAUDIT_TRIAL"
_SIGNS = ("Traceback", "Exception ignored", "Error")
_CACHE = "torchinductor_"  # torch keeps one for each user
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: ``faults`` says what is wrong with that."""

    sent: signal.Signals | None
    code: int
    stderr: str
    seconds: float
    new: tuple[str, ...]
    temporary: tuple[str, ...]
    children: tuple[str, ...]

    @staticmethod
    def word(number: signal.Signals) -> str:
        """Return what a program says that such a signal ended."""
        return WORDS[number]

    def faults(self) -> list[str]:
        """Everything that should not be."""
        found = [f"left in the temporary directory: {name}" for name in self.temporary]
        found += [f"left running: {name}" for name in self.children]
        found += [f"in stderr: {word}" for word in _SIGNS if word in self.stderr]
        if self.sent is None:
            return found + [f"exit code {self.code}"] * (self.code not in (0, 1))
        if self.code != 128 + self.sent:
            return [*found, f"exit code {self.code}, not {128 + self.sent}"]
        last = self.stderr.splitlines()[-1] if self.stderr else ""
        word, written = WORDS[self.sent], not last.endswith("; nothing was written")
        if not last.startswith(f"ampaudit: {word}; ") or not last.endswith(" written"):
            found.append(f"the last line is {last!r}")
        if self.stderr.count(word) != 1:
            found.append(f"{word!r} is said {self.stderr.count(word)} times")
        if bool(self.new) != written:
            found.append(f"new are {list(self.new)}, and it says {last!r}")
        if self.seconds > 4:
            found.append(f"{self.seconds:.1f} s from the signal to the end")
        return found


def _handle_all() -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def end_by_signal(
    arguments: Sequence[str],
    place: Path,
    temporary: Path,
    number: signal.Signals | None,
    after: float,
    again: float | None = None,
) -> Ended:
    """Run the program in ``place``; send it a signal some time after it has begun to handle them."""
    before, mark = snapshot(place), uuid.uuid4().hex
    temporary.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "ampaudit", *arguments],
        cwd=place,
        env={**os.environ, _MARK: mark, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # tests in the background of a shell ignore SIGINT, under nohup SIGHUP, and children inherit that
        preexec_fn=_handle_all,
    )
    while process.poll() is None and not _handles_signals(process.pid):
        time.sleep(0.001)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(after)
    start, sent, at_its_end = time.monotonic(), None, False
    if process.poll() is None and number is not None:
        sent = number
        process.send_signal(number)
        at_its_end = _is_exiting(process.pid)
    if again is not None and number is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(again)
        process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    seconds = time.monotonic() - start
    if at_its_end:
        sent = None
    return Ended(
        sent,
        process.returncode,
        stderr,
        seconds,
        tuple(sorted(snapshot(place) - before)),
        tuple(sorted(path.name for path in temporary.iterdir() if _CACHE not in path.name)),
        tuple(_marked(mark)),
    )


def snapshot(place: Path) -> set[str]:
    """Name every file in a directory with its time, but for the caches of Python."""
    files = (path for path in place.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {f"{path.relative_to(place)} {path.stat().st_mtime_ns}" for path in files}


def _handles_signals(pid: int) -> bool:
    """Return whether a process has a handler for SIGTERM, for which Python has none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")), "0")
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def _is_exiting(pid: int) -> bool:
    """Return whether the system takes a process down already, which takes long if it has much memory."""
    try:
        flags = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6]
    except OSError:
        return True
    return bool(int(flags) & 4)  # PF_EXITING in <linux/sched.h>


def _marked(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                found.append(str((path / "cmdline").read_bytes())[:80])
        except OSError:
            continue
    return found
