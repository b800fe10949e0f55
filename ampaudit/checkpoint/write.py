"""Writes a safetensors file tensor by tensor, holding only a few pieces in memory."""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from ampaudit.checkpoint.header import TensorEntry, header_bytes
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
    sha256 = hashlib.sha256()
    crc32: dict[str, int] = {}
    with path.open("xb", buffering=0) as stream, _one_thread(), ThreadPoolExecutor(1) as executor:

        def write(data: bytes | memoryview) -> None:
            sha256.update(data)
            view = memoryview(data)
            while view:
                view = view[stream.write(view) :]

        # a thread hashes and writes pieces while the next one is prepared
        waiting: deque[Future[None]] = deque([executor.submit(write, header_bytes(entries, metadata))])
        for entry, (name, values) in zip(entries, pieces, strict=True):
            assert entry.name == name, f"{name} is not {entry.name}"
            written = checksum = 0
            for piece in values:
                data = piece.contiguous().view(torch.uint8).numpy().data
                written += data.nbytes
                checksum = zlib.crc32(data, checksum)
                waiting.append(executor.submit(write, data))
                if len(waiting) > _AHEAD:
                    waiting.popleft().result()
            assert written == entry.size, f"{name}: {written} of {entry.size} bytes"
            crc32[name] = checksum
        for future in waiting:
            future.result()
        return Written(sha256.hexdigest(), stream.tell(), crc32)


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
