"""What tests run in a sandbox: each function returns one that is called in confinement."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def echo(request: Any) -> Callable[[], Any]:
    return lambda: request


def environment(request: Any) -> Callable[[], Any]:
    return lambda: [dict(os.environ), str(Path.cwd()), os.read(0, 1).decode()]


def native(victim: str) -> Callable[[], Any]:
    """What code outside of Python can do: the C library's functions, which no audit hook sees."""
    libc = ctypes.CDLL(None)

    def created(path: str) -> bool:
        return libc.open(path.encode(), os.O_WRONLY | os.O_CREAT, 0o600) >= 0

    def started() -> bool:
        child = libc.fork()
        if child == 0:
            arguments = (ctypes.c_char_p * 2)(b"/bin/sh", None)
            libc.execv(b"/bin/sh", arguments)
            os._exit(77)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 77

    return lambda: {
        "create": created(f"{victim}.new"),
        "create inside": created("inside"),
        "write": libc.open(victim.encode(), os.O_WRONLY) >= 0,
        "truncate": libc.truncate(victim.encode(), 0) == 0,
        "remove": libc.unlink(victim.encode()) == 0,
        "rename": libc.rename(b"inside", f"{victim}.moved".encode()) == 0,
        "link": libc.link(victim.encode(), b"linked") == 0,
        "directory": libc.mkdir(f"{victim}.d".encode(), 0o700) == 0,
        "tcp": libc.socket(socket.AF_INET, socket.SOCK_STREAM, 0) >= 0,
        "udp": libc.socket(socket.AF_INET, socket.SOCK_DGRAM, 0) >= 0,
        "unix": libc.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0) >= 0,
        "program": started(),
    }


def python(victim: str) -> Callable[[], Any]:
    """What Python code can do."""
    acts: dict[str, Callable[[], Any]] = {
        "create": lambda: Path(f"{victim}.new").write_text("x"),
        "write": lambda: Path(victim).write_bytes(b"x"),
        "remove": lambda: Path(victim).unlink(),
        "rename": lambda: Path("inside").rename(f"{victim}.moved"),
        "directory": lambda: Path(f"{victim}.d").mkdir(),
        "link": lambda: Path(f"{victim}.link").symlink_to("/"),
    }

    def done(act: Callable[[], Any]) -> bool:
        try:
            act()
        except PermissionError:
            return False
        return True

    def work() -> Any:
        Path("inside").write_text("allowed")
        return {name: done(act) for name, act in acts.items()}

    return work


def connects(_: Any) -> Callable[[], Any]:
    def work() -> None:
        with contextlib.suppress(OSError):  # as code does that falls back to something else
            socket.create_connection(("127.0.0.1", 9), 1)

    return work


def asks(_: Any) -> Callable[[], Any]:
    return lambda: input("run it? ")


def starts(_: Any) -> Callable[[], Any]:
    return lambda: os.system("true")


def allocates(_: Any) -> Callable[[], Any]:
    return lambda: len([bytearray(1 << 26) for _ in range(1000)])


def spins(_: Any) -> Callable[[], Any]:
    def work() -> None:
        while True:
            pass

    return work


def sleeps(_: Any) -> Callable[[], Any]:
    return lambda: time.sleep(600)


def prints(_: Any) -> Callable[[], Any]:
    def work() -> None:
        while True:
            print("x" * 1_000_000)

    return work


def answers_much(_: Any) -> Callable[[], Any]:
    return lambda: "x" * 20_000_000


def answers_garbage(text: str) -> Callable[[], Any]:
    def work() -> None:
        Path("answer.json").write_text(text)
        os._exit(0)

    return work


def crashes(_: Any) -> Callable[[], Any]:
    return lambda: os.kill(os.getpid(), 11)


def exits(_: Any) -> Callable[[], Any]:
    return lambda: os._exit(3)


def raises(text: str) -> Callable[[], Any]:
    def work() -> None:
        raise RuntimeError(text)

    return work


def opens_files(_: Any) -> Callable[[], Any]:
    return lambda: len([open(os.devnull) for _ in range(5000)])


def leaves_a_process(_: Any) -> Callable[[], Any]:
    libc = ctypes.CDLL(None)

    def work() -> int:
        child = libc.fork()
        if child == 0:
            libc.setsid()
            time.sleep(600)
        time.sleep(0.2)
        return int(child)

    return work
