"""Confines the current process: file writes, network, child processes and resources.

The restrictions are permanent. Mechanisms that the platform lacks are skipped; SECURITY.md lists them by
platform. The kernel's interfaces are called directly: of the packages for them, ``landlock`` is a
pre-release without support for networks and signals, ``sandlock`` adds 13 MB and needs Linux 6.7, and
``pyseccomp`` needs a C library that few systems have.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MAX_OPEN_FILES = 256
_MAX_FILE = 256_000_000  # bytes per file

# linux/prctl.h, linux/seccomp.h, linux/landlock.h
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_WRITE_FILE, _TRUNCATE, _REFER = 1 << 1, 1 << 14, 1 << 13
_CHANGE_DIRECTORY = sum(1 << bit for bit in range(4, 13))  # create and remove entries of every kind
_TCP = 0b11  # bind, connect
_SCOPES = 0b11  # abstract Unix sockets, signals
# by machine: seccomp's architecture, the number of seccomp, and the denied calls: socket, execve, execveat,
# ptrace, process_vm_writev, setpgid and setsid (which would leave the group that is killed at the end),
# pidfd_send_signal, and io_uring_setup (which bypasses the others)
_CALLS = {
    "x86_64": (0xC000003E, 317, (41, 59, 322, 101, 311, 109, 112, 424, 425)),
    "aarch64": (0xC00000B7, 277, (198, 221, 281, 117, 271, 154, 157, 424, 425)),
}
_X32 = 0x40000000  # bit that marks the x32 calls of x86-64
_ALLOW, _DENY = 0x7FFF0000, 0x00050000 | 13  # EACCES

# audit events (docs.python.org/3/library/audit_events.html), and what they attempt
_ESCAPES = {
    "builtins.input": "ask on standard input",
    "os.exec": "start a program",
    "os.fork": "start a process",
    "os.forkpty": "start a process",
    "os.posix_spawn": "start a program",
    "os.spawn": "start a program",
    "os.startfile": "start a program",
    "os.system": "start a program",
    "pty.spawn": "start a program",
    "socket.bind": "open a connection",
    "socket.connect": "open a connection",
    "socket.getaddrinfo": "open a connection",
    "socket.gethostbyname": "open a connection",
    "socket.sendto": "open a connection",
    "subprocess.Popen": "start a program",
}
_CHANGES = {"os.chmod", "os.chown", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.utime"}
_MOVES = {"os.link", "os.rename", "os.symlink"}  # their first two arguments are paths
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class _Attributes(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("directory", ctypes.c_int32))


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def die_with_parent(parent: int) -> None:
    """Kill this process when its parent ends (Linux), or now if the parent has already ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def confine_files(folder: Path) -> None:
    """Allow writes only inside a folder, and deny TCP (Linux with Landlock). Call before threads start."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    handled = _WRITE_FILE | _CHANGE_DIRECTORY
    handled |= _REFER if version >= 2 else 0
    handled |= _TRUNCATE if version >= 3 else 0
    attributes = _Attributes(handled, _TCP, _SCOPES)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = libc.syscall(_LANDLOCK_CREATE, ctypes.byref(attributes), ctypes.c_size_t(size), 0)
    if rules < 0:
        return
    _allow(libc, rules, str(folder), handled)
    _allow(libc, rules, os.devnull, handled & (_WRITE_FILE | _TRUNCATE))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.syscall(_LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str, access: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    libc.syscall(_LANDLOCK_ADD, rules, 1, ctypes.byref(_Beneath(access, place)), 0)
    os.close(place)


def confine_process() -> None:
    """Deny new sockets and programs to all threads (Linux on x86-64 and ARM64)."""
    if sys.platform != "linux" or platform.machine() not in _CALLS:
        return
    machine, seccomp, denied = _CALLS[platform.machine()]
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    count = len(denied)
    lines = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, machine),
        (end, 0, 0, _DENY),
        (load, 0, 0, 0),  # the number of the system call
        (at_least, count + 1, 0, _X32),
        *((equal, count - index, 0, number) for index, number in enumerate(denied)),
        (end, 0, 0, _ALLOW),
        (end, 0, 0, _DENY),
    ]
    program = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    seccomp_filter = _Filter(len(lines), program)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.syscall(seccomp, 1, 1, ctypes.byref(seccomp_filter))  # for all threads


def limit_resources(memory: int | None, seconds: int | None) -> None:
    """Limit the memory, processor time and open files of this process (Linux and macOS).

    Memory is in bytes that may be allocated from now on (Linux); seconds of processor time count from now.
    """
    try:
        import resource
    except ImportError:
        return
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
        resource.RLIMIT_FSIZE: _MAX_FILE,
    }
    if seconds is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limits[resource.RLIMIT_CPU] = int(used.ru_utime + used.ru_stime) + 1 + seconds
    allocated = _allocated()
    if memory is not None and allocated is not None:
        limits[resource.RLIMIT_DATA] = allocated + memory
    for kind, limit in limits.items():
        _, most = resource.getrlimit(kind)
        # the hard limit is a second later, so that SIGXCPU comes first and identifies the cause
        hard = limit + 1 if kind == resource.RLIMIT_CPU else limit
        hard = hard if most == resource.RLIM_INFINITY else min(hard, most)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (min(limit, hard), hard))


def _allocated() -> int | None:
    """Return the bytes that count towards RLIMIT_DATA; ``None`` if unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    return None


def _normalized(path: str) -> str:
    """Return an absolute path in normal case; on Windows this also expands the name of the null device."""
    return os.path.normcase(os.path.abspath(path))


def watch_calls(folder: Path, on_escape: Callable[[str], None]) -> None:
    """Deny Python code the network, child processes, standard input, and writes outside a folder.

    This works on every platform, but does not see what native code does. ``on_escape`` is called with a
    description of an attempt that no honest code makes.
    """
    inside = tuple(_normalized(str(place)) + os.sep for place in (folder.resolve(), folder))

    def allowed(path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return True  # an open file
        name = _normalized(os.fsdecode(path))
        return name == _normalized(os.devnull) or name.startswith(inside)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _ESCAPES:
            on_escape(_ESCAPES[event])
            raise PermissionError(f"{event} is not allowed here")
        if event == "open":
            path, _, flags = arguments
            if flags & _WRITING and not allowed(path):
                raise PermissionError(f"writing to {path!r} is not allowed here")
        count = 1 if event in _CHANGES else 2 if event in _MOVES else 0
        if not all(map(allowed, arguments[:count])):
            raise PermissionError(f"{event} is not allowed here")

    sys.addaudithook(hook)
