"""Reads the header of a safetensors file and validates it against the file.

The format: eight bytes with the header's length (little-endian), the header in JSON, then the tensors'
bytes without gaps (huggingface/safetensors, README, "Format"). The library's ``safe_open`` hands out
tensors; streaming them in pieces and releasing their pages needs the offsets of their bytes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter
from pydantic_core import PydanticCustomError

from ampaudit.core.errors import WeightsError, first_line
from ampaudit.core.untrusted import describe, describe_path, open_regular, parse_json, validate

__all__ = [
    "BESIDE_WEIGHTS",
    "CALL_FILES",
    "FLOAT_TYPES",
    "MANIFEST",
    "MASTER",
    "MAX_DIMENSIONS",
    "MAX_HEADER",
    "ONNX",
    "PLAN",
    "PROGRAM",
    "RECORDING",
    "REFERENCE",
    "REPORT",
    "SINGLE",
    "TORCH_NAMES",
    "Header",
    "Shape",
    "TensorEntry",
    "TypeName",
    "call_file",
    "header_bytes",
    "read_header",
]

SINGLE = "model.safetensors"  # the working weights, unless they are in shards
MASTER = "master"  # stands for "model" in the names of the masters' files
PROGRAM = "model.pt2"
ONNX = "model.onnx"
PLAN = "plan.yaml"
REPORT = "report.json"
REFERENCE = "reference.safetensors"
MANIFEST = "manifest.json"

# files of a conversion besides the weights; torch writes large ONNX weights to a separate file
BESIDE_WEIGHTS = frozenset({PROGRAM, ONNX, f"{ONNX}.data", PLAN, REPORT, REFERENCE})

# a recording: what was recorded, and two files per call
RECORDING = "recording.json"
CALL_FILES = "call-*.json"
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


@dataclass(frozen=True, slots=True)
class Header:
    """A whole header; ``entries`` are in the order of their bytes, which begin at ``data_start``."""

    entries: tuple[TensorEntry, ...]
    metadata: dict[str, str]
    data_start: int


def read_header(path: Path) -> Header:
    """Read the header of a file.

    Raises:
        WeightsError: The file is missing or no safetensors file, or its header is too long, repeats a name,
            or does not fit the file.
    """
    try:
        with os.fdopen(open_regular(path, WeightsError), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            first = stream.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
            if not 2 <= length <= size - 8:
                raise _broken(path, f"a header of {length:,} bytes in a file of {size:,}")
            if length > MAX_HEADER:
                raise _broken(path, f"a header of {length:,} bytes; {MAX_HEADER:,} are allowed")
            text = stream.read(length)
    except OSError as error:
        raise WeightsError(f"{describe_path(path)}: {error.strerror}", hint="check the disk") from error
    entries, metadata = _parsed(path, text)
    _check_layout(path, entries, size - 8 - length)
    return Header(tuple(entries), metadata, 8 + length)


def header_bytes(entries: Iterable[TensorEntry], metadata: dict[str, str]) -> bytes:
    """Return the header of a new file, in which the tensors lie in the order of the entries."""
    table: dict[str, Any] = {_METADATA: metadata} if metadata else {}
    start = 0
    for entry in entries:
        end = start + entry.size
        table[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    return struct.pack("<Q", len(text)) + text


def _parsed(path: Path, text: bytes) -> tuple[list[TensorEntry], dict[str, str]]:
    try:
        table = parse_json(text)
    except ValueError as error:
        raise _broken(path, f"its header: {first_line(error)}") from error
    if not isinstance(table, dict):
        raise _broken(path, "its header is not a JSON object")
    metadata = table.pop(_METADATA, {})
    rows = validate(_ROWS, table, path, WeightsError, _HINT)
    texts = validate(_TEXTS, {_METADATA: metadata}, path, WeightsError, _HINT)[_METADATA]
    entries: list[TensorEntry] = []
    for name, row in rows.items():
        start, end = row.data_offsets
        entry = TensorEntry(name, row.dtype, row.shape, start)
        if math.prod(max(1, size) for size in row.shape) > _MAX_NUMBER:
            raise _broken(path, f"tensor {describe(name)!r} needs too many bytes")
        if end - start != entry.size:
            shape = describe(entry.shape)
            needs = f"of shape {shape} needs {entry.size:,} bytes, not {end - start:,}"
            raise _broken(path, f"tensor {describe(name, 40)!r} {needs}")
        entries.append(entry)
    return sorted(entries, key=lambda entry: (entry.start, entry.size)), texts


def _check_layout(path: Path, entries: list[TensorEntry], available: int) -> None:
    at = 0
    for entry in entries:
        if entry.start != at:
            raise _broken(path, f"tensor {describe(entry.name)!r} overlaps another one, or leaves a gap")
        at += entry.size
    if at > available:
        cut = next(e for e in entries if e.start + e.size > available)
        raise _broken(path, f"the file is truncated: it ends within tensor {describe(cut.name)!r}")
    if at < available:
        raise _broken(path, f"{available - at:,} bytes after the last tensor belong to no tensor")


def _broken(path: Path, what: str) -> WeightsError:
    return WeightsError(f"{describe_path(path)}: not a valid safetensors file: {what}", hint=_HINT)


def call_file(number: int) -> str:
    """Return the name of the file with a call's arguments; its tensors are beside it."""
    return f"call-{number:06d}.json"
