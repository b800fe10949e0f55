"""Writes a safetensors file tensor by tensor, holding only a few pieces in memory."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from ampaudit.checkpoint.header import TensorEntry, laid_out
from ampaudit.checkpoint.parts import RING, Part

__all__ = ["Written", "write_part", "write_safetensors"]

_AHEAD = RING - 4  # pieces that wait for the disk, in buffers that are not used again meanwhile


@dataclass(frozen=True, slots=True)
class Written:
    """Checksums of a written file."""

    sha256: str
    size: int  # of the file in bytes
    crc32: dict[str, int]  # of each tensor, to name the one that differs


def write_safetensors(
    path: Path,
    entries: Sequence[TensorEntry],
    metadata: dict[str, str],
    pieces: Iterable[tuple[str, Iterator[torch.Tensor]]],
) -> Written:
    """Write a new file of tensors, whose values come in flat pieces, in the order of the entries.

    Raises:
        OSError: The file cannot be written, for example because the disk is full.
    """
    head, placed = laid_out(entries, metadata)
    crc32: dict[str, int] = {}
    with path.open("xb", buffering=0) as stream, _one_thread(), _Hand(stream) as hand:
        hand.take(head)
        for entry, (name, values) in zip(placed, pieces, strict=True):
            assert entry.name == name, f"{name} is not {entry.name}"
            written = checksum = 0
            for piece in values:
                data = piece.contiguous().view(torch.uint8).numpy().data
                written += data.nbytes
                checksum = zlib.crc32(data, checksum)
                hand.take(data)
            assert written == entry.size, f"{name}: {written} of {entry.size} bytes"
            crc32[name] = checksum
    return Written(hand.sha256.hexdigest(), hand.size, crc32)


def write_part(path: Path, part: Part, names: Iterable[str] | None = None) -> Written:
    """Write the tensors of a part unchanged; all of them unless names are given.

    Raises:
        OSError: The file cannot be written, for example because the disk is full.
    """
    entries = [part.entries[name] for name in (part.entries if names is None else names)]
    pieces = ((entry.name, part.pieces(entry.name)) for entry in entries)
    return write_safetensors(path, entries, part.metadata, pieces)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: casting is faster than reading and would slow down the writer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Hand:
    """A thread that hashes and writes pieces while the next one is prepared."""

    def __init__(self, stream: FileIO) -> None:
        self.sha256 = hashlib.sha256()
        self.size = 0
        self._stream = stream
        self._waiting: queue.Queue[bytes | memoryview | None] = queue.Queue(_AHEAD)
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

    def take(self, data: bytes | memoryview) -> None:
        """Queue bytes to be written."""
        if self._failure is not None:
            raise self._failure
        self._waiting.put(data)

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            if self._failure is not None:
                continue  # keep taking, so that the writer does not block
            try:
                self._write(item)
            except BaseException as error:
                self._failure = error

    def _write(self, data: bytes | memoryview) -> None:
        self.sha256.update(data)
        view = memoryview(data)
        while view:
            view = view[self._stream.write(view) :]
        self.size += memoryview(data).nbytes
