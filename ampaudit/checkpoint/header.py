"""Reads the header of a safetensors file and validates it against the file.

The format: eight bytes with the header's length (little-endian), the header in JSON, then the tensors'
bytes without gaps (huggingface/safetensors, README, "Format").
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampaudit.core.errors import WeightsError, first_line

__all__ = [
    "FLOAT_TYPES",
    "MAX_HEADER",
    "TORCH_NAMES",
    "DuplicateName",
    "Header",
    "TensorEntry",
    "laid_out",
    "read_header",
    "unique_json",
]

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_METADATA = "__metadata__"
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}  # fmt: skip
FLOAT_TYPES = frozenset({"F16", "BF16", "F32", "F64"})


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        name: the tensor's name.
        dtype: the safetensors name of its type, such as ``F32``.
        shape: its sizes.
        start: offset of its first byte in the data.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def size(self) -> int:
        """The number of bytes."""
        return math.prod(self.shape) * _BITS[self.dtype] // 8

    @property
    def elements(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Header:
    """A whole header; ``entries`` are in the order of their bytes, which begin at ``data_start``."""

    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]
    data_start: int


def read_header(path: Path) -> Header:
    """Read the header of a file.

    Raises:
        WeightsError: missing, not a safetensors file, too long, a repeated name, or it does not fit the file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            first = stream.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
            if not 2 <= length <= size - 8:
                raise _broken(path, f"a header of {length:,} bytes in a file of {size:,}")
            if length > MAX_HEADER:
                raise _broken(path, f"a header of {length:,} bytes; {MAX_HEADER:,} are allowed")
            text = stream.read(length)
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}", hint="check the path") from error
    entries, metadata = _parsed(path, text)
    _check_layout(path, entries, size - 8 - length)
    return Header(tuple(entries), metadata, 8 + length)


def laid_out(
    entries: Iterable[TensorEntry], metadata: dict[str, str]
) -> tuple[bytes, tuple[TensorEntry, ...]]:
    """Lay out a new file; return its header as bytes, and the entries with their offsets."""
    placed: list[TensorEntry] = []
    table: dict[str, Any] = {_METADATA: metadata} if metadata else {}
    start = 0
    for entry in entries:
        placed.append(TensorEntry(entry.name, entry.dtype, entry.shape, start))
        end = start + entry.size
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    return struct.pack("<Q", len(text)) + text, tuple(placed)


def _parsed(path: Path, text: bytes) -> tuple[list[TensorEntry], dict[str, str]]:
    try:
        table = unique_json(text)
    except ValueError as error:
        raise _broken(path, f"its header: {first_line(error)}") from error
    if not isinstance(table, dict):
        raise _broken(path, "its header is not a JSON object")
    metadata = table.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _broken(path, "its metadata values are not strings")
    entries = [_entry(path, name, item) for name, item in table.items()]
    return sorted(entries, key=lambda entry: (entry.start, entry.size)), metadata


def _entry(path: Path, name: str, item: Any) -> TensorEntry:
    try:
        dtype, shape, (start, end) = item["dtype"], item["shape"], item["data_offsets"]
        numbers = [start, end, *shape]
    except (TypeError, KeyError, ValueError) as error:
        raise _broken(path, f"tensor {name!r} lacks its dtype, shape or offsets") from error
    if dtype not in _BITS:
        raise _broken(path, f"tensor {name!r} has the unknown type {str(dtype)[:40]!r}")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise _broken(path, f"tensor {name!r} has a size or offset that is not a non-negative integer")
    entry = TensorEntry(name, dtype, tuple(shape), start)
    if end - start != entry.size:
        raise _broken(
            path, f"tensor {name!r} of shape {entry.shape} needs {entry.size:,} bytes, not {end - start:,}"
        )
    return entry


def _check_layout(path: Path, entries: list[TensorEntry], available: int) -> None:
    at = 0
    for entry in entries:
        if entry.start != at:
            raise _broken(path, f"tensor {entry.name!r} overlaps another one, or leaves a gap")
        at += entry.size
    if at > available:
        cut = next(e for e in entries if e.start + e.size > available)
        raise _broken(path, f"the file is truncated: it ends within tensor {cut.name!r}")
    if at < available:
        raise _broken(path, f"{available - at:,} bytes after the last tensor belong to no tensor")


def _broken(path: Path, what: str) -> WeightsError:
    return WeightsError(f"{path}: not a valid safetensors file: {what}", hint="download or save it again")


class DuplicateName(ValueError):
    """Raised for an object with a duplicate name; most readers silently take the last one."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the name {name!r} occurs twice")


def unique_json(text: bytes | str) -> Any:
    """Parse untrusted JSON, rejecting duplicate names in an object.

    Raises:
        ValueError: not JSON, nested too deeply, or (``DuplicateName``) a repeated name.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise DuplicateName(name)
        found[name] = value
    return found
