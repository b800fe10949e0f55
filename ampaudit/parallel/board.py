"""Exchanges messages and heartbeats between ranks through a TCP store."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ampaudit.core.errors import RunFailed, UsageError, first_line
from ampaudit.core.untrusted import describe

__all__ = ["Board", "rank_timeout"]

_BEAT_SECONDS = 1.0
_ANSWER_SECONDS = 120.0  # for a connection, and for a reply
_START_SECONDS = 30.0  # minimum, for the import of torch
_LIMIT = "AMPAUDIT_RANK_TIMEOUT"
_HUNG_SECONDS = 600.0  # without progress; a batch of a large model takes minutes
_CHUNK = 1 << 24  # bytes of a key's value in the store


def rank_timeout(environment: Mapping[str, str] = os.environ) -> float:
    """Return the seconds without progress after which a rank counts as hung.

    Raises:
        UsageError: The environment variable is not a positive number.
    """
    text = environment.get(_LIMIT, str(_HUNG_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UsageError(f"{_LIMIT} is {describe(text)}", hint="set it to a number of seconds, such as 600")
    return seconds


class Board:
    """Entries by key, and two counters per rank: heartbeats and progress.

    Args:
        store: Store shared by all ranks.
        rank: Rank of this process.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._processes: dict[int, str] = {}

    @classmethod
    def connect(cls, rank: int, name: str = "") -> Board:
        """Connect to the store of ``torchrun``, or of rank 0.

        Args:
            rank: Rank of this process.
            name: Name of the work, for processes started by those of the same ranks.

        Raises:
            RunFailed: The store cannot be reached.
        """
        with _store_errors():
            board = cls(_store(rank, name), rank)
            beats = _store(-1, name)
        board.put(f"process/{rank}", f"{_machine_name()}:{os.getpid()}".encode())
        threading.Thread(target=_beat, args=(beats, rank), daemon=True).start()
        return board

    def put(self, key: str, data: bytes) -> None:
        """Add an entry; its key must be new."""
        pieces = range(0, len(data), _CHUNK)
        with _store_errors():
            for number, start in enumerate(pieces):
                self._store.set(f"{key}/{number}", data[start : start + _CHUNK])  # type: ignore[arg-type]
            self._store.set(key, str(len(pieces)))

    def has(self, key: str) -> bool:
        """Return whether an entry exists."""
        with _store_errors():
            return bool(self._store.check([key]))

    def get(self, key: str) -> bytes:
        """Return an existing entry."""
        with _store_errors():
            count = int(self._store.get(key))
            return b"".join(self._store.get(f"{key}/{number}") for number in range(count))

    def take(self, key: str) -> bytes:
        """Return an existing entry and remove it."""
        data = self.get(key)
        for number in range(int(self._store.get(key))):
            self._store.delete_key(f"{key}/{number}")
        self._store.delete_key(key)
        return data

    def moved(self, rank: int) -> None:
        """Increase a rank's progress counter."""
        with _store_errors():
            self._store.add(f"moved/{rank}", 1)

    def counters(self, rank: int) -> tuple[int, int]:
        """Return a rank's heartbeat and progress counters."""
        with _store_errors():
            return self._store.add(f"alive/{rank}", 0), self._store.add(f"moved/{rank}", 0)

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank's process ran on this machine and has ended."""
        if rank not in self._processes:
            if not self.has(f"process/{rank}"):
                return False
            self._processes[rank] = self.get(f"process/{rank}").decode()
        machine, _, process = self._processes[rank].rpartition(":")
        return machine == _machine_name() and _has_ended(int(process))


@contextmanager
def _store_errors() -> Iterator[None]:
    """Raise ``RunFailed`` if the store does not answer."""
    try:
        yield
    except RuntimeError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RunFailed(
            f"the ranks have lost each other: {first_line(error)}",
            hint=f"see that rank 0 runs, and that all can reach {where}",
        ) from error


def _machine_name() -> str:
    """Return a name of the machine or container, within which process ids are unique."""
    try:
        numbers = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # a system without process namespaces
        numbers = ""
    return f"{socket.gethostname()} {numbers}"


def _has_ended(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE  # until its parent reaps it
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def _store(rank: int, name: str) -> Store:
    """Connect to the store; rank 0 serves it unless torchrun's agent does."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and not name and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout = timedelta(seconds=min(_ANSWER_SECONDS, max(_START_SECONDS, rank_timeout())))
    store = TCPStore(host, port, is_master=serves, timeout=timeout, wait_for_workers=False)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"ampaudit/{run}/{restart}/{name}", store)


def _beat(store: Store, rank: int) -> None:
    """Increase the heartbeat counter until the process ends."""
    pause = threading.Event()
    while True:
        try:
            store.add(f"alive/{rank}", 1)
        except RuntimeError:  # the store has ended
            return
        pause.wait(_BEAT_SECONDS)
