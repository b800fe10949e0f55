"""Keeps the values of large tensors out of parsing and serializing ONNX models.

A protocol buffer is processed as a whole, which takes twice its size in memory. So the bytes of large
initializers are replaced by references to their position in the file, in the form that ONNX has for
external data. Field numbers are those of onnx.proto3.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

from typing_extensions import Buffer

from ampaudit.source.onnx.checks import MAX_NODES, BadGraph

__all__ = ["LARGE", "OWN_FILE", "without_large_values", "write_with_values"]

OWN_FILE = "\x00"  # not a path: the location of a tensor in the model's own file
LARGE = 4096  # bytes; larger tensors stay in the file
_MAX_PARSED = 1 << 30  # bytes without large values
_PARSED_UNCOUNTED = 1 << 23  # bytes that cannot become too many objects
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


class _Field(NamedTuple):
    """A field of a message, with the offsets of its tag and its value."""

    number: int
    kind: int
    begin: int
    start: int
    end: int


def without_large_values(data: mmap.mmap) -> bytes:
    """Return the bytes of a ModelProto with large initializers turned into external data.

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

    Args:
        stripped: Serialized model; a reference has the index of its value as offset, and its size as length.
        stream: Binary stream to write to.
        values: Functions that return the bytes of each value, called in order of the file.
    """
    for field in _fields(stripped, 0, len(stripped)):
        if field.number != _GRAPH or field.kind != _BYTES:
            stream.write(stripped[field.begin : field.end])
            continue
        parts = [_reference(stripped, part) or part for part in _fields(stripped, field.start, field.end)]
        size = sum(p.end - p.begin if isinstance(p, _Field) else p.size for p in parts)
        stream.write(_varint(_GRAPH << 3 | _BYTES) + _varint(size))
        for part in parts:
            if isinstance(part, _Field):
                stream.write(stripped[part.begin : part.end])
            else:
                stream.write(part.head)
                stream.write(values[part.number]())


class _Reference(NamedTuple):
    """A tensor without its value: the index of the value, the bytes before it, and the size of both."""

    number: int
    head: bytes
    size: int


def _reference(data: bytes, field: _Field) -> _Reference | None:
    """Return the reference of an initializer to the model's own file; ``None`` for other fields."""
    if field.number != _INITIALIZER or field.kind != _BYTES:
        return None
    rest, location = bytearray(), {}
    for part in _fields(data, field.start, field.end):
        if part.number == _EXTERNAL_DATA:
            key, value = (data[f.start : f.end].decode() for f in _fields(data, part.start, part.end))
            location[key] = value
        elif part.number != _DATA_LOCATION:
            rest += data[part.begin : part.end]
    if location.get("location") != OWN_FILE:
        return None
    length = int(location["length"])
    rest += _varint(_RAW_DATA << 3 | _BYTES) + _varint(length)
    head = _varint(_INITIALIZER << 3 | _BYTES) + _varint(len(rest) + length) + bytes(rest)
    return _Reference(int(location["offset"]), head, len(head) + length)


def _graph(data: mmap.mmap, graph: _Field) -> bytes:
    content = bytearray()
    nodes = listed = 0
    for field in _fields(data, graph.start, graph.end):
        nodes, listed = nodes + (field.number == _NODE), listed + 1
        if nodes > MAX_NODES or listed > _MAX_FIELDS:
            raise BadGraph(f"has more than {MAX_NODES:,} nodes", "export a part of the model")
        if field.number == _INITIALIZER and field.kind == _BYTES and field.end - field.start > LARGE:
            content += _message(_INITIALIZER, _tensor(data, field))
        else:
            content += _within_limit(data, field, content)
    return bytes(content)


def _within_limit(data: mmap.mmap, field: _Field, output: bytearray) -> bytes:
    """Return the bytes of a field, unless the output would exceed its limit."""
    if len(output) + field.end - field.begin > _MAX_PARSED:
        raise BadGraph(f"has more than {_MAX_PARSED:,} bytes beside its initializers", _STORE)
    return data[field.begin : field.end]


def _count(data: bytearray, start: int, end: int, message: _Message, count: int) -> int:
    """Count the fields of nested messages; a few bytes of each take hundreds in memory."""
    for field in _fields(data, start, end):
        count += 1
        if count > _MAX_FIELDS:
            raise BadGraph(f"has more than {_MAX_FIELDS:,} nodes, attributes and names", _STORE)
        inner = message.get(field.number)
        if inner is not None and field.kind == _BYTES:
            count = _count(data, field.start, field.end, inner, count)
    return count


def _tensor(data: mmap.mmap, tensor: _Field) -> bytes:
    content = bytearray()
    for field in _fields(data, tensor.start, tensor.end):
        length = field.end - field.start
        if field.number != _RAW_DATA or field.kind != _BYTES or length <= LARGE:
            content += data[field.begin : field.end]
            continue
        for key, value in (("location", OWN_FILE), ("offset", str(field.start)), ("length", str(length))):
            content += _message(_EXTERNAL_DATA, _message(1, key.encode()) + _message(2, value.encode()))
        content += _varint(_DATA_LOCATION << 3 | _VARINT) + _varint(1)
    return bytes(content)


def _fields(data: mmap.mmap | bytearray | bytes, start: int, end: int) -> Iterator[_Field]:
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


def _read_varint(data: mmap.mmap | bytearray | bytes, place: int, end: int) -> tuple[int, int]:
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
