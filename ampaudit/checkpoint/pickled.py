"""Reads a state_dict from a file of torch.save; the file's pickle is interpreted as data and never run."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ampaudit.checkpoint.archive import Archive, map_privately
from ampaudit.checkpoint.header import MAX_DIMENSIONS
from ampaudit.checkpoint.parts import flat_tensor, misfit
from ampaudit.checkpoint.plain_pickle import (
    MAX_PICKLE,
    GlobalName,
    Opaque,
    Pairs,
    RefusedPickle,
    StorageRecord,
    TensorRecord,
    interpret,
)
from ampaudit.core.errors import WeightsError
from ampaudit.core.untrusted import MAX_DEPTH, describe, describe_path

__all__ = ["Storages", "read_plain_data", "read_state_dict"]

_STORAGES = {
    "UntypedStorage": torch.uint8, "BoolStorage": torch.bool, "ByteStorage": torch.uint8,
    "CharStorage": torch.int8, "ShortStorage": torch.int16, "IntStorage": torch.int32,
    "LongStorage": torch.int64, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001  # of torch.save before 1.6
_MAX_SHARED = 100  # bytes of all tensors per byte of the file, as tensors may share theirs
_MAX_SMALL = 64_000_000  # bytes of all tensors in any case
_MAX_VALUES = 100_000  # beside tensors' elements
_STATE_DICT_ONLY = "torch.save model.state_dict() only"


def read_state_dict(path: Path) -> dict[str, torch.Tensor]:
    """Map the tensors of a pickled checkpoint by name.

    Raises:
        WeightsError: The file is missing, corrupt, or a pickle with anything but tensors and plain data.
    """
    try:
        value, storages, size = _read(path)
        for wrapper in ("state_dict", "model"):
            if isinstance(value, Pairs) and isinstance(inner := value.get(wrapper), Pairs):
                value = inner
        if not isinstance(value, Pairs):
            raise RefusedPickle("it holds no state_dict", _STATE_DICT_ONLY)
        if not all(type(name) is str for name, _ in value.pairs):
            raise RefusedPickle("a name of a tensor is not text", _STATE_DICT_ONLY)
        tensors = {name: storages.tensor(record, name) for name, record in dict(value.pairs).items()}
        if sum(tensor.nbytes for tensor in tensors.values()) > max(_MAX_SHARED * size, _MAX_SMALL):
            raise RefusedPickle("its tensors share too few bytes", "save it again")
    except RefusedPickle as error:
        raise WeightsError(f"{describe_path(path)}: {error}", hint=error.hint) from error
    return tensors


def read_plain_data(archive: Archive) -> Any:
    """Return what ``torch.save`` wrote: tensors, numbers, texts and dtypes, in tuples, lists and dicts.

    Raises:
        RefusedPickle: The file holds anything else.
        AuditError: The file is damaged. The error has the archive's type.
    """
    return _plain(*_in_archive(archive), count(), 0)


def _plain(value: Any, storages: Storages, counter: Iterator[int], depth: int) -> Any:
    """Build a value; one that is shared is built, and counted, each time."""
    if next(counter) > _MAX_VALUES or depth > MAX_DEPTH:
        raise RefusedPickle("it holds too many values")

    def build(item: Any) -> Any:
        return _plain(item, storages, counter, depth + 1)

    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (tuple, list):
        return type(value)(build(item) for item in value)
    if isinstance(value, TensorRecord):
        return storages.tensor(value, "a tensor")
    if isinstance(value, Pairs) and all(type(key) in (str, int) for key, _ in value.pairs):
        return {key: build(item) for key, item in value.pairs}
    dtype = getattr(torch, value.name.rpartition(".")[2], None) if isinstance(value, GlobalName) else None
    if isinstance(dtype, torch.dtype):
        return dtype
    raise RefusedPickle(f"it holds {describe(getattr(value, 'name', type(value).__name__))}")


class Storages:
    """The storages of a file, by their key, and the tensors in them.

    ``bytes_of`` returns the writable bytes of a key.
    """

    def __init__(self, bytes_of: Callable[[str], memoryview]) -> None:
        self._bytes_of = bytes_of
        self._found: dict[str, torch.Tensor] = {}

    def tensor(self, record: Any, name: str) -> torch.Tensor:
        """Make the tensor of a record, which shares memory with the others in its storage.

        Raises:
            RefusedPickle: The record is not a tensor, or leaves its storage.
        """
        shown = describe(name)
        if not isinstance(record, TensorRecord):
            what = f" but {record.name}" if isinstance(record, Opaque) else ""
            raise RefusedPickle(f"{shown!r} is not a tensor{what}", _STATE_DICT_ONLY)
        if not isinstance(record.storage, StorageRecord) or record.storage.kind not in _STORAGES:
            raise RefusedPickle(f"{shown!r} has a type that is not read", "dequantize it, then save it")
        dtype = _STORAGES[record.storage.kind] if record.dtype is None else getattr(torch, record.dtype, None)
        if not isinstance(dtype, torch.dtype) or str(dtype).startswith("torch.q"):
            raise RefusedPickle(f"{shown!r} has no type")
        flat = self._flat(record.storage, shown)
        if not _fits(record, flat.numel() // dtype.itemsize):
            raise RefusedPickle(f"{shown!r} leaves its storage, or is too large for it")
        tensor = torch.empty(0, dtype=dtype)
        tensor.set_(flat.untyped_storage(), record.offset, record.size, record.stride)
        if isinstance(record.metadata, Pairs):  # carry out what was pending when it was saved
            tensor = tensor.conj().resolve_conj() if record.metadata.get("conj") is True else tensor
            tensor = -tensor if record.metadata.get("neg") is True else tensor
        return tensor

    def _flat(self, storage: StorageRecord, shown: str) -> torch.Tensor:
        itemsize = _STORAGES[storage.kind].itemsize
        if type(storage.key) is not str or type(storage.count) is not int:
            raise RefusedPickle
        flat = self._found.get(storage.key)
        if flat is None:
            flat = flat_tensor(self._bytes_of(storage.key), torch.uint8)
            if flat.data_ptr() % 16:
                flat = flat.clone()  # kernels may want aligned values
            self._found[storage.key] = flat
        if flat.numel() != storage.count * itemsize:
            raise RefusedPickle(f"the storage of {shown!r} has {flat.numel():,} bytes, which is not its size")
        return flat


def _fits(record: TensorRecord, available: int) -> bool:
    """Return whether a tensor lies in its storage and has no more elements, unless it is small."""
    size, stride = record.size, record.stride
    if type(size) is not tuple or type(stride) is not tuple or len(size) != len(stride):
        return False
    numbers = (record.offset, *size, *stride)
    if len(size) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        return False
    return not misfit(size, stride, record.offset, available)


def _read(path: Path) -> tuple[Any, Storages, int]:
    """Return what a file holds, its storages, and its size."""
    data = memoryview(map_privately(path, WeightsError))
    if bytes(data[:2]) != b"PK":
        return *_legacy(data), len(data)
    archive = Archive(path, WeightsError, data)
    if "constants.pkl" in archive.members:
        raise RefusedPickle("it is a TorchScript program", "torch.save the state_dict() of its model")
    return *_in_archive(archive), len(data)


def _in_archive(archive: Archive) -> tuple[Any, Storages]:
    value = interpret(io.BytesIO(archive.read("data.pkl", MAX_PICKLE)), [])
    return value, Storages(lambda key: archive.mapped(f"data/{key}"))


def _legacy(data: memoryview) -> tuple[Any, Storages]:
    """Read a file of torch before 1.6: pickles, then each storage's number of elements and bytes."""
    if bytes(data[257:262]) == b"ustar":
        raise RefusedPickle("it is a tar file of torch before 0.1.12", "load it in torch and save it again")
    stream = io.BytesIO(data[:MAX_PICKLE])
    records: list[StorageRecord] = []
    magic, version, host = (interpret(stream, []) for _ in range(3))
    if magic != _MAGIC or version != _VERSION or not isinstance(host, Pairs) or not host.get("little_endian"):
        raise RefusedPickle("it is not a file of torch.save", _STATE_DICT_ONLY)
    value, keys = interpret(stream, records), interpret(stream, [])
    itemsizes = {
        r.key: _STORAGES[r.kind].itemsize for r in records if type(r.key) is str and r.kind in _STORAGES
    }
    places: dict[str, memoryview] = {}
    place = stream.tell()
    for key in keys if isinstance(keys, list) else ():
        itemsize = itemsizes.get(key) if type(key) is str else None
        if itemsize is None or place + 8 > len(data):
            raise RefusedPickle
        size = struct.unpack_from("<q", data, place)[0] * itemsize
        if not 0 <= size <= len(data) - place - 8:
            raise RefusedPickle("the file is truncated")
        places[key] = data[place + 8 : place + 8 + size]
        place += 8 + size
    return value, Storages(lambda key: places.get(key, data[:0]))
