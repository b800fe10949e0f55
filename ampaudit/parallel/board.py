"""The board on which ranks tell each other something: a TCP store, with a sign of life of each rank."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

__all__ = ["Board"]

_BEAT_SECONDS = 1.0
_CONNECT = timedelta(seconds=120)
_CHUNK = 1 << 24  # bytes of one entry


class Board:
    """Entries by key, and two counters per rank: signs of life, and progress.

    Args:
        store: of all ranks.
        rank: of this process.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._processes: dict[int, str] = {}

    @classmethod
    def connect(cls, rank: int, process: str) -> Board:
        """Connect to the store of ``torchrun``, or of rank 0.

        Args:
            rank: of this process.
            process: its host and number, so that others can see whether it lives.
        """
        board = cls(_store(rank), rank)
        board.put(f"process/{rank}", process.encode())
        threading.Thread(target=_beat, args=(_store(-1), rank), daemon=True).start()
        return board

    def put(self, key: str, data: bytes) -> None:
        """Set an entry, which must be new."""
        pieces = range(0, len(data), _CHUNK)
        for number, start in enumerate(pieces):
            self._store.set(f"{key}/{number}", data[start : start + _CHUNK])  # type: ignore[arg-type]
        self._store.set(key, str(len(pieces)))

    def has(self, key: str) -> bool:
        """Return whether there is an entry."""
        return bool(self._store.check([key]))

    def get(self, key: str) -> bytes:
        """Return an entry that is there."""
        count = int(self._store.get(key))
        return b"".join(self._store.get(f"{key}/{number}") for number in range(count))

    def take(self, key: str) -> bytes:
        """Return an entry that is there, and remove it."""
        found = self.get(key)
        for number in range(int(self._store.get(key))):
            self._store.delete_key(f"{key}/{number}")
        self._store.delete_key(key)
        return found

    def moved(self, rank: int) -> None:
        """Count a rank's progress."""
        self._store.add(f"moved/{rank}", 1)

    def counters(self, rank: int) -> tuple[int, int]:
        """Return a rank's signs of life, and its progress."""
        return self._store.add(f"alive/{rank}", 0), self._store.add(f"moved/{rank}", 0)

    def is_gone(self, rank: int) -> bool:
        """Return whether a rank is known to have ended: a process of this machine that is no more."""
        if rank not in self._processes:
            if not self.has(f"process/{rank}"):
                return False
            self._processes[rank] = self.get(f"process/{rank}").decode()
        host, _, process = self._processes[rank].rpartition(":")
        if host != socket.gethostname():
            return False
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return False


def _store(rank: int) -> Store:
    """Return a connection; rank 0 serves it, if no agent does."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(host, port, is_master=serves, timeout=_CONNECT, wait_for_workers=False)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return PrefixStore(f"ampaudit/{run}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _beat(store: Store, rank: int) -> None:
    """Count signs of life until the process ends."""
    pause = threading.Event()
    while True:
        try:
            store.add(f"alive/{rank}", 1)
        except RuntimeError:  # the store has ended, and so does everything
            return
        pause.wait(_BEAT_SECONDS)
