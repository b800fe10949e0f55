"""Writes a safetensors file tensor by tensor: nothing but a few pieces is ever in memory."""

from __future__ import annotations

import hashlib
import queue
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ampaudit.checkpoint.header import Entry, laid_out

__all__ = ["Written", "write_safetensors"]

_AHEAD = 2  # pieces that wait for the disk while the next one is made


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written.

    Attributes:
        sha256: of the whole file.
        size: its bytes.
        crc32: of each tensor's bytes, to name the one that differs.
    """

    sha256: str
    size: int
    crc32: dict[str, int]


def write_safetensors(
    path: Path,
    entries: Sequence[Entry],
    metadata: dict[str, str],
    pieces: Iterable[tuple[str, Iterator[torch.Tensor]]],
) -> Written:
    """Write the tensors in the order of the entries.

    Args:
        path: the new file.
        entries: name, dtype and shape of each tensor.
        metadata: texts kept in the header.
        pieces: for each entry, in order, its name and its values in flat pieces.

    Raises:
        OSError: the disk is full, say.
    """
    head, placed = laid_out(entries, metadata)
    with path.open("xb", buffering=0) as stream, _Hand(stream) as hand:
        hand.take(None, head)
        for entry, (name, values) in zip(placed, pieces, strict=True):
            assert entry.name == name, f"{name} is not {entry.name}"
            written = 0
            for piece in values:
                data = piece.contiguous().view(torch.uint8).numpy().tobytes()
                written += len(data)
                hand.take(name, data)
            assert written == entry.size, f"{name}: {written} of {entry.size} bytes"
            hand.crc32.setdefault(name, 0)
    return Written(hand.sha256.hexdigest(), hand.size, hand.crc32)


class _Hand:
    """A thread that hashes and writes what it is given, while the next piece is made."""

    def __init__(self, stream: object) -> None:
        self.sha256 = hashlib.sha256()
        self.size = 0
        self.crc32: dict[str, int] = {}
        self._stream = stream
        self._waiting: queue.Queue[tuple[str | None, bytes] | None] = queue.Queue(_AHEAD)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="ampaudit-writer", daemon=True)

    def __enter__(self) -> _Hand:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._waiting.put(None)
        self._thread.join()
        if self._failure is not None and kind is None:
            raise self._failure

    def take(self, name: str | None, data: bytes) -> None:
        """Write these bytes next; they belong to a tensor, or to none."""
        if self._failure is not None:
            raise self._failure
        self._waiting.put((name, data))

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            if self._failure is not None:
                continue  # keep taking, so that nobody waits for ever
            try:
                self._write(*item)
            except BaseException as error:
                self._failure = error

    def _write(self, name: str | None, data: bytes) -> None:
        self.sha256.update(data)
        if name is not None:
            self.crc32[name] = zlib.crc32(data, self.crc32.get(name, 0))
        view = memoryview(data)
        while view:
            view = view[self._stream.write(view) :]  # type: ignore[attr-defined]
        self.size += len(data)
