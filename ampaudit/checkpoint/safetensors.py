"""Reads, maps and writes safetensors files, tensor by tensor and in pieces of a few megabytes.

The format: eight bytes with the header's length (little-endian), the header in JSON, then the tensors'
bytes without gaps (huggingface/safetensors, README, "Format"). The library's ``safe_open`` returns whole
tensors; streaming them in pieces and releasing their pages needs the offsets of their bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter
from pydantic_core import PydanticCustomError

from ampaudit.checkpoint import TORCH_NAMES
from ampaudit.checkpoint.archive import map_privately
from ampaudit.core.errors import WeightsError, first_line
from ampaudit.core.untrusted import describe, describe_path, open_regular, parse_json, validate

PIECE = 1 << 19  # elements: 2 MiB of float32, which stay in the cache while they are cast and summed
RING = 8  # buffers, used in turn
_AHEAD = RING - 4  # pieces that wait for the disk; fewer than the buffers, so that none is overwritten
_DROP_SECONDS = 0.1
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_METADATA = "__metadata__"
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
_TYPE_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
_MAX_NUMBER = (1 << 63) - 1
_HINT = "download or save it again"


def _known_type(name: str) -> str:
    if name not in _BITS:
        raise PydanticCustomError("dtype", "unknown type {name}", {"name": repr(describe(name, 40))})
    return name


TypeName = Annotated[str, AfterValidator(_known_type)]
_Number = Annotated[int, Field(ge=0, le=_MAX_NUMBER)]
MAX_DIMENSIONS = 64  # of a tensor, in torch
Shape = Annotated[tuple[_Number, ...], Field(max_length=MAX_DIMENSIONS)]


class _Row(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    dtype: TypeName
    shape: Annotated[Shape, Field(strict=False)]  # JSON has no tuples
    data_offsets: Annotated[list[_Number], Field(min_length=2, max_length=2)]


_ROWS = TypeAdapter(dict[str, _Row])
_TEXTS = TypeAdapter(dict[str, dict[str, str]], config=ConfigDict(strict=True))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: str  # in safetensors, such as ``F32``
    shape: tuple[int, ...]
    start: int = 0  # of its first byte in the data

    @property
    def size(self) -> int:
        """The number of bytes."""
        return math.prod(self.shape) * _BITS[self.dtype] // 8

    @property
    def elements(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


class Part(Protocol):
    """The tensors of one file, in the order of their bytes."""

    label: str
    metadata: dict[str, str]
    entries: dict[str, TensorEntry]

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the tensor's values in flat pieces; a piece is valid until ``RING`` more are requested."""


@dataclass(frozen=True, slots=True)
class MappedWeights:
    """Tensors by name; safetensors files are mapped privately, so writes do not change the file."""

    tensors: dict[str, torch.Tensor]
    _mappings: dict[int, tuple[mmap.mmap, int, int]] = field(default_factory=dict)

    def drop(self, tensor: torch.Tensor) -> None:
        """Release the memory of a tensor; its values are read again on next use.

        Changes to the tensor are lost.
        """
        place = self._mappings.get(tensor.data_ptr())
        if place is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        mapping, start, length = place
        begin = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # only whole pages of the tensor
        end = (start + length) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)

    @contextlib.contextmanager
    def dropping(self) -> Iterator[None]:
        """Release the memory of all tensors repeatedly while active, for code that reads in any order."""
        done = threading.Event()
        mappings = {mapping for mapping, _, _ in self._mappings.values()}

        def work() -> None:
            while not done.wait(_DROP_SECONDS):
                for mapping in mappings:
                    mapping.madvise(mmap.MADV_DONTNEED)

        thread = threading.Thread(target=work, name="ampaudit-dropper", daemon=True)
        if hasattr(mmap, "MADV_DONTNEED"):
            thread.start()
        try:
            yield
        finally:
            done.set()
            if thread.is_alive():
                thread.join()


class SafetensorsFile:
    """A safetensors file.

    Raises:
        WeightsError: The file is missing or not a safetensors file, or its header is too long, repeats a
            name, or does not fit the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.label = path.name
        try:
            with os.fdopen(open_regular(path, WeightsError), "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                first = stream.read(8)
                length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
                if not 2 <= length <= size - 8:
                    raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
                if length > MAX_HEADER:
                    raise ValueError(f"a header of {length:,} bytes; {MAX_HEADER:,} are allowed")
                table = _table(stream.read(length))
            metadata = {_METADATA: table.pop(_METADATA, {})}
            rows = validate(_ROWS, table, path, WeightsError, _HINT)
            self.metadata = validate(_TEXTS, metadata, path, WeightsError, _HINT)[_METADATA]
            self.entries = _entries(rows, size - 8 - length)
        except OSError as error:
            raise WeightsError(f"{describe_path(path)}: {error.strerror}", hint="check the disk") from error
        except ValueError as error:
            what = f"{describe_path(path)}: not a valid safetensors file: {error}"
            raise WeightsError(what, hint=_HINT) from error
        self._data_start = 8 + length
        self._ring = [torch.empty(0, dtype=torch.uint8)] * RING
        self._turn = 0

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield pieces that are read into a ring of buffers; mapped pages would count as process memory."""
        entry = self.entries[name]
        dtype = dtype_of(entry.dtype)
        unit = 1 if dtype is None else dtype.itemsize
        whole = entry.size // unit
        try:
            with self.path.open("rb", buffering=0) as stream:
                stream.seek(self._data_start + entry.start)
                for start in range(0, whole, PIECE):
                    piece = self._buffer(min(PIECE, whole - start) * unit)
                    _fill(stream, piece.numpy().data, self.path)
                    yield piece if dtype is None else piece.view(dtype)
        except OSError as error:
            raise WeightsError(
                f"{describe_path(self.path)}: {error.strerror}", hint="check the disk"
            ) from error

    def _buffer(self, size: int) -> torch.Tensor:
        """Return the next buffer of the ring, cut to a size."""
        self._turn = (self._turn + 1) % RING
        if self._ring[self._turn].numel() < size:
            self._ring[self._turn] = torch.empty(size, dtype=torch.uint8)
        return self._ring[self._turn][:size]

    def map_into(self, weights: MappedWeights) -> None:
        """Map every tensor without reading it.

        Raises:
            WeightsError: A tensor has a type that torch lacks, or memory does not suffice.
        """
        mapping = map_privately(self.path, WeightsError)
        for entry in self.entries.values():
            dtype = dtype_of(entry.dtype)
            if dtype is None:
                what = f"torch has no type for {describe(entry.name)!r} ({entry.dtype})"
                raise WeightsError(f"{describe_path(self.path)}: {what}", hint="dequantize it, then save it")
            if entry.size == 0:
                weights.tensors[entry.name] = torch.empty(entry.shape, dtype=dtype)
                continue
            start = self._data_start + entry.start
            flat = torch.frombuffer(mapping, dtype=dtype, count=entry.elements, offset=start)
            if start % dtype.itemsize:
                flat = flat.clone()  # kernels may want aligned values
            else:
                weights._mappings[flat.data_ptr()] = (mapping, start, entry.size)
            weights.tensors[entry.name] = flat.view(entry.shape)


class InMemory:
    """Tensors in memory: those of a model, or those of a mapped ``.pt`` file."""

    def __init__(self, label: str, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> None:
        self.label, self.metadata, self.tensors = label, metadata, tensors
        self.entries: dict[str, TensorEntry] = {}
        for name, tensor in tensors.items():
            if name == _METADATA:
                what = f"{describe(label)}: a tensor is named {name!r}, which safetensors cannot hold"
                raise WeightsError(what, hint="rename it")
            dtype = type_name(tensor.dtype, f"{describe(label)}: {describe(name)!r}")
            self.entries[name] = TensorEntry(name, dtype, tuple(tensor.shape))

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield slices of the tensor, or of a contiguous copy."""
        whole = self.tensors[name].detach().cpu().contiguous()
        flat = whole.as_strided((whole.numel(),), (1,))  # a tensor of one element may have any stride
        for start in range(0, flat.numel(), PIECE):
            yield flat[start : start + PIECE]


def _table(header: bytes) -> dict[str, Any]:
    try:
        table = parse_json(header)
    except ValueError as error:
        raise ValueError(f"its header: {first_line(error)}") from error
    if not isinstance(table, dict):
        raise ValueError("its header is not a JSON object")
    return table


def _entries(rows: dict[str, _Row], available: int) -> dict[str, TensorEntry]:
    """Sort entries by position, and check that they fill the available bytes without gaps or overlaps."""
    entries: list[TensorEntry] = []
    for name, row in rows.items():
        start, end = row.data_offsets
        entry = TensorEntry(name, row.dtype, row.shape, start)
        if math.prod(max(1, size) for size in row.shape) > _MAX_NUMBER:
            raise ValueError(f"tensor {describe(name)!r} needs too many bytes")
        if end - start != entry.size:
            shape = describe(entry.shape)
            needs = f"of shape {shape} needs {entry.size:,} bytes, not {end - start:,}"
            raise ValueError(f"tensor {describe(name, 40)!r} {needs}")
        entries.append(entry)
    entries.sort(key=lambda entry: (entry.start, entry.size))
    at = 0
    for entry in entries:
        if entry.start != at:
            raise ValueError(f"tensor {describe(entry.name)!r} overlaps another one, or leaves a gap")
        at += entry.size
    if at > available:
        cut = next(e for e in entries if e.start + e.size > available)
        raise ValueError(f"the file is truncated: it ends within tensor {describe(cut.name)!r}")
    if at < available:
        raise ValueError(f"{available - at:,} bytes after the last tensor belong to no tensor")
    return {entry.name: entry for entry in entries}


def _fill(stream: FileIO, view: memoryview, path: Path) -> None:
    done = 0
    while done < len(view):
        count = stream.readinto(view[done:])
        if not count:
            raise WeightsError(f"{describe_path(path)}: was truncated while it was read", hint="try again")
        done += count


def dtype_of(name: str) -> torch.dtype | None:
    """Return the torch dtype of a safetensors type; ``None`` if torch has none."""
    dtype: torch.dtype | None = getattr(torch, TORCH_NAMES.get(name, ""), None)
    return None if name == "F4" else dtype


def type_name(dtype: torch.dtype, what: str) -> str:
    """Return the safetensors name of a torch dtype.

    Raises:
        WeightsError: Safetensors has no such type.
    """
    name = _TYPE_NAMES.get(str(dtype).removeprefix("torch."))
    if name is None:
        raise WeightsError(f"{what} is {dtype}, which safetensors cannot hold", hint="convert or drop it")
    return name


def clipped(values: torch.Tensor, smallest: float, largest: float) -> torch.Tensor:
    """Clip the magnitude of finite values to the limits; 0, inf and NaN stay as they are."""
    magnitude = values.abs().clamp(smallest, largest)
    limited = torch.copysign(magnitude, values)
    return torch.where(values.isfinite() & (values != 0), limited, values)


def header_bytes(entries: Iterable[TensorEntry], metadata: dict[str, str]) -> bytes:
    """Return the header of a new file with the tensors in the order of the entries."""
    table: dict[str, Any] = {_METADATA: metadata} if metadata else {}
    start = 0
    for entry in entries:
        end = start + entry.size
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """Checksums of a written file."""

    sha256: str
    size: int  # of the file in bytes
    crc32: dict[str, int]  # of each tensor, to name a damaged one


def write_safetensors(
    path: Path,
    entries: Sequence[TensorEntry],
    metadata: dict[str, str],
    pieces: Iterable[tuple[str, Iterator[torch.Tensor]]],
) -> WrittenFile:
    """Write a new file of tensors, whose values arrive in flat pieces in the order of the entries.

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
        return WrittenFile(sha256.hexdigest(), stream.tell(), crc32)


def write_part(path: Path, part: Part, names: Iterable[str] | None = None) -> WrittenFile:
    """Write the tensors of a part unchanged, by default all of them.

    Raises:
        OSError: The file cannot be written, for example because the disk is full.
    """
    entries = [part.entries[name] for name in (part.entries if names is None else names)]
    pieces = ((entry.name, part.pieces(entry.name)) for entry in entries)
    return write_safetensors(path, entries, part.metadata, pieces)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: casting is faster than reading, and would slow down the writer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
