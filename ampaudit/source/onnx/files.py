"""Reads an ONNX file as data: its graph, and its tensors mapped into memory.

Parsing a protocol buffer takes twice its size in memory. So before parsing, the bytes of large initializers
are replaced by external data: a reference to their position in the file. Field numbers are those of
onnx.proto3.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import IO, Any, NamedTuple

import onnx
import onnx_ir as ir
import torch
from typing_extensions import Buffer

from ampaudit.checkpoint.archive import map_privately
from ampaudit.core.errors import SourceError
from ampaudit.core.untrusted import MAX_MESSAGE, describe, describe_path
from ampaudit.source.onnx.checks import MAX_NODES, BadGraph, check_model, name_standard_domain, node_title
from ampaudit.source.onnx.names import graphs_of

OWN_FILE = "\x00"  # not a path: the location of a tensor in the model's own file
LARGE = 4096  # bytes; larger tensors stay in the file
_MAX_PARSED = 1 << 30  # bytes without large values
_PARSED_UNCOUNTED = 1 << 23  # bytes; smaller models cannot become too many objects
_MAX_FIELDS = 3_000_000
_STORE = "export it with its weights as initializers, or a part of the model"
_NODE = 1
_GRAPH, _INITIALIZER, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 7, 5, 9, 13, 14
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

_Message = dict[int, Any]  # message types of the fields of a message, by number
_NODES: _Message = {}
_BODY: _Message = {1: _NODES, 5: {}, 11: {}, 12: {}, 13: {}}
_NODES[5] = {5: {}, 6: _BODY, 10: {}, 11: _BODY}
_MODEL: _Message = {7: _BODY, 25: {7: _NODES, 9: {}}}
_DTYPES = {
    "FLOAT": torch.float32, "FLOAT16": torch.float16, "BFLOAT16": torch.bfloat16, "DOUBLE": torch.float64,
    "INT64": torch.int64, "INT32": torch.int32, "INT16": torch.int16, "INT8": torch.int8,
    "UINT64": torch.uint64, "UINT32": torch.uint32, "UINT16": torch.uint16, "UINT8": torch.uint8,
    "BOOL": torch.bool, "COMPLEX64": torch.complex64, "COMPLEX128": torch.complex128,
    "FLOAT8E4M3FN": torch.float8_e4m3fn, "FLOAT8E5M2": torch.float8_e5m2,
    "FLOAT8E4M3FNUZ": torch.float8_e4m3fnuz, "FLOAT8E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
_POINTER = b"version https://git-lfs"
_HALF_BYTES = ("INT4", "UINT4")
_MAX_RANK = 64  # torch's limit
_SAVE_AGAIN = "export or download it again"
_NO_TYPE = "torch has no such type: store it as float32, or leave the part of the model out that needs it"


@dataclass(slots=True)
class OnnxFile:
    """An ONNX model whose tensors stay in their files until they are read."""

    path: Path
    model: ir.Model  # whose tensors must be read through ``tensor``
    _mappings: dict[Path, mmap.mmap] = dataclasses.field(default_factory=dict)
    _cache: dict[tuple[Path, int, int, int], torch.Tensor] = dataclasses.field(default_factory=dict)

    def reopened(self) -> OnnxFile:
        """Read the model again, sharing the tensors in memory."""
        again = read_onnx(self.path)
        again._mappings, again._cache = self._mappings, self._cache
        return again

    def tensor(self, value: ir.TensorProtocol, place: str = "") -> torch.Tensor:
        """Return the values of a tensor, memory-mapped if they are aligned in the file.

        Four-bit integers become int8. In errors, ``place`` stands for the name of an unnamed tensor.

        Raises:
            SourceError: The data is missing, of the wrong size, or of a type that torch lacks.
        """
        name = describe(getattr(value, "name", "") or place)
        if not isinstance(getattr(value, "dtype", None), ir.DataType):
            raise self._error(f"the constant {name!r} is not a tensor")
        half = value.dtype.name in _HALF_BYTES
        dtype = torch.uint8 if half else torch_dtype_of(value.dtype)
        if dtype is None:
            raise self._error(f"the tensor {name!r} has the type {value.dtype.name}", _NO_TYPE)
        shape = tuple(int(size) for size in value.shape.numpy())
        elements = math.prod(shape)
        too_large = len(shape) > _MAX_RANK or math.prod(max(size, 1) for size in shape) >> 60
        if too_large or min(shape, default=0) < 0:
            raise self._error(f"the tensor {name!r} has the shape {describe(list(shape))}")
        size = -(-elements // 2) if half else elements * dtype.itemsize
        if isinstance(value, ir.ExternalTensor):
            flat = self._mapped(value, size, dtype.itemsize)
        else:
            try:
                data = value.tobytes()
            except (ValueError, TypeError, OverflowError) as error:
                raise self._error(f"the tensor {name!r}: {describe(error)}") from error
            if len(data) != size:
                raise self._error(f"the tensor {name!r} of {size:,} bytes has {len(data):,}")
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        if not elements:
            return torch.empty(shape, dtype=torch.int8 if half else dtype)
        if half:
            codes = unpacked(flat, 4)[:elements].to(torch.int8).view(shape)
            return (codes ^ 8) - 8 if value.dtype.name == "INT4" else codes
        if dtype == torch.bool:
            return (flat != 0).view(shape)
        return flat.view(dtype).view(shape)

    def _mapped(self, value: ir.ExternalTensor, size: int, alignment: int) -> torch.Tensor:
        location, name = str(value.location), str(value.name)
        path = self.path if location == OWN_FILE else self._data_path(location, name)
        if path not in self._mappings:
            self._mappings[path] = map_privately(path, SourceError)
        mapping, start = self._mappings[path], value.offset or 0
        length = size if value.length is None else value.length
        if start < 0 or length != size or start + size > len(mapping):
            raise self._error(
                f"the tensor {describe(name)!r} of {size:,} bytes lies outside its data "
                f"({length:,} bytes from {start:,} of {len(mapping):,})"
            )
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        key = (path, start, size, alignment)
        if key not in self._cache:
            flat = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)
            if start % alignment:
                flat = flat.clone()  # kernels may require alignment
                if hasattr(mmap, "MADV_DONTNEED"):  # release the pages
                    begin = start // mmap.PAGESIZE * mmap.PAGESIZE
                    mapping.madvise(mmap.MADV_DONTNEED, begin, start + size - begin)
            self._cache[key] = flat
        return self._cache[key]

    def constant(self, node: ir.Node) -> torch.Tensor:
        """Return the value of a Constant node.

        Raises:
            SourceError: The value is text, or missing.
        """
        for name, attribute in node.attributes.items():
            if name == "value":
                return self.tensor(attribute.value, str(node.outputs[0].name))
            if name in ("value_float", "value_floats"):
                return torch.tensor(attribute.value, dtype=torch.float32)
            if name in ("value_int", "value_ints"):
                return torch.tensor(attribute.value, dtype=torch.int64)
        raise self._error(f"the constant {describe(node.name or node.outputs[0].name)!r} is not a number")

    def nodes(self) -> Iterator[ir.Node]:
        """Yield the nodes of all graphs."""
        for graph in graphs_of(self.model):
            yield from graph

    def _data_path(self, location: str, name: str) -> Path:
        """Return the path of external data, which must lie in the model's directory."""
        folder = self.path.parent.resolve()
        what = f"the data of {describe(name)!r}"
        try:
            path = (folder / location).resolve()
            exists = path.is_file()
        except (OSError, ValueError, RuntimeError):
            raise self._error(f"{what} is in {describe(location)}, which is not a path") from None
        if path == folder or not path.is_relative_to(folder):
            raise self._error(
                f"{what} is outside its directory: {describe(location) or 'no file is named'}",
                "copy the data into the model's directory (no link), and name it by a relative location",
            )
        if not exists:
            raise self._error(f"{what} is missing: {describe(location)}", "copy that file beside the model")
        return path

    def _error(self, what: str, hint: str = _SAVE_AGAIN) -> SourceError:
        return SourceError(describe(f"{self.path}: {what}", MAX_MESSAGE), hint=hint)


def torch_dtype_of(dtype: ir.DataType) -> torch.dtype | None:
    """Return the torch dtype; ``None`` for strings and numbers of less than eight bits."""
    return _DTYPES.get(dtype.name)


def read_onnx(path: Path) -> OnnxFile:
    """Read a model, leaving its tensors in their files.

    Raises:
        SourceError: The file is missing, truncated, or not an ONNX model.
    """
    if not path.exists():
        raise SourceError(f"no such file: {describe_path(path)}", hint="check the path of the .onnx file")
    mapping = map_privately(path, SourceError)
    if mapping[: len(_POINTER)] == _POINTER:
        raise SourceError(f"{describe_path(path)} is a pointer of Git LFS", hint="git lfs pull")
    try:
        proto = onnx.ModelProto()
        proto.ParseFromString(without_large_values(mapping))
        name_standard_domain(proto)
        check_model(proto)
        model = ir.from_proto(proto)
        _sort(model.graph)
        for function in model.functions.values():
            _sort(function)
    except BadGraph as error:
        raise SourceError(describe(f"{path}: {error}", MAX_MESSAGE), hint=error.hint) from error
    except Exception as error:  # whatever the parser raises
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        what = f"is not an ONNX model, or damaged: {describe(cause, 100)}"
        raise SourceError(f"{describe_path(path)} {what}", hint=_SAVE_AGAIN) from error
    file = OnnxFile(path, model)
    file._mappings[path] = mapping
    return file


def _sort(graph: ir.Graph | ir.Function) -> None:
    """Sort nodes topologically."""
    try:
        graph.sort()
    except ValueError:
        name = "a node"
        try:
            TopologicalSorter({node: node.predecessors() for node in graph}).prepare()
        except CycleError as error:
            node = error.args[1][0]
            name = node_title(node.name or node.outputs[0].name or "", node.op_type)
        raise BadGraph(f"{name} depends on its own result") from None


def unpacked(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack integers of a few bits from bytes along the last axis, low bits first."""
    parts = [tensor >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(-2)


class _Field(NamedTuple):
    """A field of a message, with the offsets of its tag and its value."""

    number: int
    kind: int
    begin: int
    start: int
    end: int


def without_large_values(data: mmap.mmap) -> bytes:
    """Return the bytes of a ModelProto in which external data stands for large initializers.

    Raises:
        BadGraph: The model has too many nodes, or is too large without these values.
        ValueError: The data ends too early, or is not a protocol buffer.
    """
    stripped = bytearray()
    for field in _fields(data, 0, len(data)):
        if field.number == _GRAPH and field.kind == _BYTES:
            stripped += _message(_GRAPH, _graph(data, field))
        else:
            stripped += _within_limit(data, field, stripped)
    if len(stripped) > _PARSED_UNCOUNTED:
        _count(stripped, 0, len(stripped), _MODEL, 0)
    return bytes(stripped)


def write_with_values(stripped: bytes, stream: IO[bytes], values: Sequence[Callable[[], Buffer]]) -> None:
    """Write a ModelProto, replacing references to its own file by values.

    The offset of a reference is an index into ``values``, whose functions return the bytes; its length is
    their number. The functions are called in the order of the file.
    """
    data = memoryview(stripped)
    for field in _fields(data, 0, len(data)):
        if field.number != _GRAPH or field.kind != _BYTES:
            stream.write(data[field.begin : field.end])
            continue
        parts = [_without_reference(data, part) for part in _fields(data, field.start, field.end)]
        size = sum(len(head) + length for head, _, length in parts)
        stream.write(_varint(_GRAPH << 3 | _BYTES) + _varint(size))
        for head, number, _ in parts:
            stream.write(head)
            if number is not None:
                stream.write(values[number]())


def _without_reference(data: memoryview, field: _Field) -> tuple[bytes | memoryview, int | None, int]:
    """Return the bytes of a field of the graph before its value, and the value's index and length, if any."""
    whole = data[field.begin : field.end], None, 0
    if field.number != _INITIALIZER or field.kind != _BYTES:
        return whole
    rest, location = bytearray(), {}
    for part in _fields(data, field.start, field.end):
        if part.number == _EXTERNAL_DATA:
            key, value = (bytes(data[f.start : f.end]).decode() for f in _fields(data, part.start, part.end))
            location[key] = value
        elif part.number != _DATA_LOCATION:
            rest += data[part.begin : part.end]
    if location.get("location") != OWN_FILE:
        return whole
    length = int(location["length"])
    rest += _varint(_RAW_DATA << 3 | _BYTES) + _varint(length)
    head = _varint(_INITIALIZER << 3 | _BYTES) + _varint(len(rest) + length) + bytes(rest)
    return head, int(location["offset"]), length


def _graph(data: mmap.mmap, graph: _Field) -> bytes:
    content = bytearray()
    nodes = fields = 0
    for field in _fields(data, graph.start, graph.end):
        nodes, fields = nodes + (field.number == _NODE), fields + 1
        if nodes > MAX_NODES or fields > _MAX_FIELDS:
            what = f"has more than {MAX_NODES:,} nodes, or {_MAX_FIELDS:,} nodes and values"
            raise BadGraph(what, "export a part of the model")
        if field.number == _INITIALIZER and field.kind == _BYTES and field.end - field.start > LARGE:
            content += _message(_INITIALIZER, _tensor(data, field))
        else:
            content += _within_limit(data, field, content)
    return bytes(content)


def _within_limit(data: mmap.mmap, field: _Field, output: bytearray) -> bytes:
    """Return the bytes of a field, unless the output would exceed its limit."""
    if len(output) + field.end - field.begin > _MAX_PARSED:
        raise BadGraph(f"has more than {_MAX_PARSED:,} bytes besides its initializers", _STORE)
    return data[field.begin : field.end]


def _count(data: bytearray, start: int, end: int, message: _Message, count: int) -> int:
    """Add the number of fields in nested messages to a count, and limit it.

    A field of a few bytes takes hundreds in memory.
    """
    for field in _fields(data, start, end):
        count += 1
        if count > _MAX_FIELDS:
            raise BadGraph(f"has more than {_MAX_FIELDS:,} nodes, attributes and names", _STORE)
        inner = message.get(field.number)
        if inner is not None and field.kind == _BYTES:
            count = _count(data, field.start, field.end, inner, count)
    return count


def _tensor(data: mmap.mmap, tensor: _Field) -> bytes:
    content, reference = bytearray(), bytearray()
    for field in _fields(data, tensor.start, tensor.end):
        length = field.end - field.start
        if field.number != _RAW_DATA or field.kind != _BYTES or length <= LARGE:
            content += data[field.begin : field.end]
            continue
        for key, value in (("location", OWN_FILE), ("offset", str(field.start)), ("length", str(length))):
            reference += _message(_EXTERNAL_DATA, _message(1, key.encode()) + _message(2, value.encode()))
        reference += _varint(_DATA_LOCATION << 3 | _VARINT) + _varint(1)
    return bytes(content + reference)  # the last occurrence of a field counts


def _fields(data: mmap.mmap | bytearray | memoryview, start: int, end: int) -> Iterator[_Field]:
    place = start
    while place < end:
        begin = place
        tag, place = _read_varint(data, place, end)
        kind = tag & 7
        if kind == _BYTES:
            length, place = _read_varint(data, place, end)
            stop = place + length
        elif kind == _VARINT:
            _, stop = _read_varint(data, place, end)
        elif kind in (_FIXED64, _FIXED32):
            stop = place + (8 if kind == _FIXED64 else 4)
        else:
            raise ValueError("it is not a protocol buffer")
        if stop > end:
            raise ValueError("it ends too early")
        yield _Field(tag >> 3, kind, begin, place, stop)
        place = stop


def _read_varint(data: mmap.mmap | bytearray | memoryview, place: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        if place >= end:
            raise ValueError("it ends too early")
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
    raise ValueError("it is not a protocol buffer")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _message(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content
