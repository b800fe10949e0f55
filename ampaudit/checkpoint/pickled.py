"""Reads files of torch.save: state dicts and plain data. A pickle is interpreted as data and never run.

Opcodes are those of pickle protocols 2 to 4 that torch.save writes for state dicts and training
checkpoints. The names that a pickle would import are looked up in a table of inert stand-ins.

``torch.load(weights_only=True)`` is no substitute: it reads no pickle of protocol 4, rejects a whole
checkpoint because of one quantized tensor, hashes the keys that the file chooses, and would have to run in a
confined process, in which importing torch takes longer than reading the file.
"""

from __future__ import annotations

import io
import math
import pickletools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from ampaudit.checkpoint.archive import Archive, map_privately
from ampaudit.checkpoint.safetensors import MAX_DIMENSIONS
from ampaudit.core.errors import WeightsError
from ampaudit.core.untrusted import MAX_DEPTH, describe, describe_path

MAX_PICKLE = 64_000_000  # bytes
_SAVE_AGAIN = "torch.save model.state_dict() only, or use safetensors"
MAX_OPCODES = 3_000_000  # 90,000 tensors; each may take some 100 bytes of memory
_MAX_EXPANDED = 1 << 20  # elements of a tensor with more than its storage
_STORAGES = {
    "UntypedStorage": torch.uint8, "BoolStorage": torch.bool, "ByteStorage": torch.uint8,
    "CharStorage": torch.int8, "ShortStorage": torch.int16, "IntStorage": torch.int32,
    "LongStorage": torch.int64, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001  # of torch.save before 1.6
_MAX_SHARED = 100  # bytes of all tensors per byte of the file; tensors may share bytes
_MAX_SMALL = 64_000_000  # bytes of all tensors that are allowed in any case
_MAX_VALUES = 100_000  # besides the elements of tensors
_STATE_DICT_ONLY = "torch.save model.state_dict() only"
_TENSORS_ONLY = "torch.save the tensors of model.state_dict() only"


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
            raise RefusedPickle("it does not contain a state_dict", _STATE_DICT_ONLY)
        if not all(type(name) is str for name, _ in value.pairs):
            raise RefusedPickle("a name of a tensor is not text", _STATE_DICT_ONLY)
        tensors = {name: storages.tensor(record, name) for name, record in dict(value.pairs).items()}
        if sum(tensor.nbytes for tensor in tensors.values()) > max(_MAX_SHARED * size, _MAX_SMALL):
            raise RefusedPickle("its tensors share too few bytes", "save it again")
    except RefusedPickle as error:
        raise WeightsError(f"{describe_path(path)}: {error}", hint=error.hint) from error
    return tensors


def read_plain_data(archive: Archive) -> Any:
    """Read a file of ``torch.save`` with tensors, numbers, strings and dtypes in tuples, lists and dicts.

    Raises:
        RefusedPickle: The file holds anything else.
        AuditError: The file is damaged. The error has the archive's type.
    """
    return _plain(*_in_archive(archive), count(), 0)


def _plain(value: Any, storages: Storages, counter: Iterator[int], depth: int) -> Any:
    """Build a value; a shared one is built, and counted, each time that it occurs."""
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
    """The storages of a file by key, and the tensors in them.

    ``bytes_of`` returns the writable bytes of the storage with a key.
    """

    def __init__(self, bytes_of: Callable[[str], memoryview]) -> None:
        self._bytes_of = bytes_of
        self._tensors: dict[str, torch.Tensor] = {}

    def tensor(self, record: Any, name: str) -> torch.Tensor:
        """Build the tensor of a record; tensors in one storage share memory.

        Raises:
            RefusedPickle: The record is not a tensor, or leaves its storage.
        """
        shown = describe(name)
        if not isinstance(record, TensorRecord):
            what = f" but {record.name}" if isinstance(record, Opaque) else ""
            raise RefusedPickle(f"{shown!r} is not a tensor{what}", _TENSORS_ONLY)
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
        if isinstance(record.metadata, Pairs):  # apply what was pending: a conjugation or a negation
            tensor = tensor.conj().resolve_conj() if record.metadata.get("conj") is True else tensor
            tensor = -tensor if record.metadata.get("neg") is True else tensor
        return tensor

    def _flat(self, storage: StorageRecord, shown: str) -> torch.Tensor:
        itemsize = _STORAGES[storage.kind].itemsize
        if type(storage.key) is not str or type(storage.count) is not int:
            raise RefusedPickle
        flat = self._tensors.get(storage.key)
        if flat is None:
            flat = flat_tensor(self._bytes_of(storage.key), torch.uint8)
            if flat.data_ptr() % 16:
                flat = flat.clone()  # kernels may want aligned values
            self._tensors[storage.key] = flat
        if flat.numel() != storage.count * itemsize:
            raise RefusedPickle(f"the storage of {shown!r} has {flat.numel():,} bytes, which is not its size")
        return flat


def _fits(record: TensorRecord, available: int) -> bool:
    """Return whether a record is well-formed and fits its storage; see ``misfit``."""
    size, stride = record.size, record.stride
    if type(size) is not tuple or type(stride) is not tuple or len(size) != len(stride):
        return False
    numbers = (record.offset, *size, *stride)
    if len(size) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers):
        return False
    return not misfit(size, stride, record.offset, available)


def flat_tensor(view: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that shares these bytes; unlike ``torch.frombuffer``, it accepts no bytes at all."""
    return torch.frombuffer(view, dtype=dtype) if len(view) else torch.empty(0, dtype=dtype)


def misfit(
    sizes: Sequence[int], strides: Sequence[int], offset: int, stored: int, expanded: int = _MAX_EXPANDED
) -> str:
    """Return why a tensor does not lie in its storage, or repeats it too often; empty if it fits.

    All numbers count elements and are not negative; there is one stride per size. A tensor may have as many
    elements as its storage (``stored``), or up to ``expanded`` if that is more.
    """
    elements = math.prod(sizes)
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if offset > stored or (elements and last >= stored):
        return f"needs more than the {stored:,} values that are stored"
    if elements > max(stored, expanded):
        return f"claims {elements:,} values, of which {stored:,} are stored"
    return ""


def _read(path: Path) -> tuple[Any, Storages, int]:
    """Return the value in a file, its storages, and its size."""
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


class Pairs:
    """A dict as a list of pairs, because hashing keys that an attacker chooses could take forever."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[Any, Any]]) -> None:
        self.pairs = pairs

    def get(self, name: str) -> Any:
        """Return the value of a name, the last one if there are several; ``None`` if there is none."""
        return next((value for key, value in reversed(self.pairs) if type(key) is str and key == name), None)


class Opaque(NamedTuple):
    """A value that is not needed, such as a set or a sparse tensor."""

    name: str


class StorageRecord(NamedTuple):
    """The bytes of tensors: their key in the archive, type and number of elements."""

    kind: str
    key: Any
    count: Any


class TensorRecord(NamedTuple):
    """A tensor in a storage, with the values of the file, which are unchecked."""

    storage: Any
    offset: Any
    size: Any
    stride: Any
    dtype: str | None = None
    metadata: Any = None


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A name that the pickle would import, and what calling it stands for."""

    name: str
    call: Callable[..., Any] | None = None


def _table(*args: Any) -> Pairs:
    pairs = args[0] if args else []
    if isinstance(pairs, Pairs):
        return Pairs(list(pairs.pairs))
    return Pairs([(key, value) for key, value in pairs])


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *more: Any) -> TensorRecord:
    return TensorRecord(storage, offset, size, stride, None, more[2] if len(more) > 2 else None)


def _typed_tensor(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, metadata: Any = None
) -> TensorRecord:
    return TensorRecord(storage, offset, size, stride, dtype.name.removeprefix("torch."), metadata)


def _subclass(function: Any, _kind: Any, args: Any, _state: Any) -> Any:
    # not this function itself, nor one that copies its argument
    if not function.name.startswith("torch._utils._rebuild_"):
        raise ValueError
    return function.call(*args)


def _first(value: Any, *_: Any) -> Any:
    return value


def _opaque(name: str) -> Callable[..., Opaque]:
    return lambda *_: Opaque(name)


STAND_INS: dict[str, Callable[..., Any] | None] = {
    "collections.OrderedDict": _table,
    "collections.Counter": _table,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _first,
    "torch._tensor._rebuild_from_type_v2": _subclass,
    "torch._utils._rebuild_qtensor": _opaque("a quantized tensor"),
    "torch._utils._rebuild_sparse_tensor": _opaque("a sparse tensor"),
    "torch._utils._rebuild_nested_tensor": _opaque("a nested tensor"),
    "torch._utils._rebuild_meta_tensor_no_storage": _opaque("a tensor without data"),
    "torch.Size": _first,
    **dict.fromkeys(("torch.Tensor", "torch.nn.parameter.Parameter")),
    **{
        name: _opaque(name.rpartition(".")[2])
        for name in (
            *("torch.device", "torch.serialization._get_layout", "_codecs.encode"),
            *(f"builtins.{name}" for name in ("set", "frozenset", "bytes", "bytearray", "complex")),
        )
    },
    **{
        f"torch.{name}": None
        for name in (
            "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 "
            "complex32 complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz "
            "float8_e8m0fnu float4_e2m1fn_x2 quint8 qint8 qint32 quint4x2 quint2x4 per_tensor_affine "
            "per_channel_affine per_tensor_symmetric per_channel_symmetric per_channel_affine_float_qparams "
            "storage.UntypedStorage UntypedStorage BoolStorage ByteStorage CharStorage ShortStorage "
            "IntStorage LongStorage HalfStorage BFloat16Storage FloatStorage DoubleStorage "
            "ComplexFloatStorage ComplexDoubleStorage QUInt8Storage QInt8Storage QInt32Storage "
            "QUInt4x2Storage QUInt2x4Storage"
        ).split()
    },
}


class RefusedPickle(ValueError):
    """Raised for a pickle that is damaged or holds more than plain data; the message is escaped."""

    def __init__(
        self, message: str = "its pickle is damaged", hint: str = "download or save it again"
    ) -> None:
        super().__init__(message)
        self.hint = hint


class CodeNeeded(RefusedPickle):
    """Raised for a pickle with an import that plain data do not need, such as the class of a module."""


def interpret(stream: BinaryIO, storages: list[StorageRecord]) -> Any:
    """Interpret a pickle, and return plain data with ``Pairs``, ``TensorRecord`` and ``Opaque`` objects.

    The stream is read to the end of the pickle. Every storage that the pickle names is added to ``storages``.

    Raises:
        RefusedPickle: The pickle is damaged, or needs more than plain data do, such as a class.
    """
    reader = _Reader(storages)
    try:
        for done, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if done > MAX_OPCODES:
                raise RefusedPickle(f"its pickle has more than {MAX_OPCODES:,} opcodes")
            act = _ACTIONS.get(opcode.name)
            if act is None:
                raise RefusedPickle(f"its pickle has the opcode {opcode.name}, which plain data do not need")
            act(reader, argument)
        return reader.stack.pop()
    except RefusedPickle:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise RefusedPickle from error


class _Reader:
    def __init__(self, storages: list[StorageRecord]) -> None:
        self.storages = storages
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.copied = 0

    def mark(self, _: Any) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def items(self) -> list[Any]:
        """Remove and return the items above the mark."""
        items, self.stack = self.stack, self.marked.pop()
        return items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def put(self, index: int) -> None:
        if index > MAX_OPCODES:
            raise RefusedPickle
        self.memo[index] = self.stack[-1]

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise RefusedPickle
        self.stack[len(self.stack) - count :] = [tuple(self.stack[len(self.stack) - count :])]

    def extend(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(values)
        elif not isinstance(target, Opaque):  # the items of a set
            raise RefusedPickle

    def set_item(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1].pairs.append((key, value))

    def set_items(self, _: Any) -> None:
        items = self.items()
        self.stack[-1].pairs.extend(zip(items[::2], items[1::2], strict=True))

    def global_named(self, name: str) -> None:
        path = name.replace(" ", ".", 1).replace("__builtin__.", "builtins.", 1)
        path = path.replace("torch.cuda.", "torch.", 1) if path.endswith("Storage") else path
        if path not in STAND_INS:
            raise CodeNeeded(f"its pickle needs {describe(path)}, which would run code", _SAVE_AGAIN)
        self.stack.append(GlobalName(path, STAND_INS[path]))

    def stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise RefusedPickle
        self.global_named(f"{module} {name}")

    def reduce(self, _: Any) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, GlobalName) or function.call is None:
            raise RefusedPickle
        # any number of functions may copy the same container
        self.copied += sum(
            len(a.pairs if isinstance(a, Pairs) else a) for a in args if type(a) in (Pairs, list)
        )
        if self.copied > MAX_OPCODES:
            raise RefusedPickle
        self.stack.append(function.call(*args))

    def build(self, _: Any) -> None:
        """Ignore the attributes of a dict (its ``_metadata``) or of a tensor."""
        self.stack.pop()
        if not isinstance(self.stack[-1], Pairs | TensorRecord):
            raise RefusedPickle

    def persistent(self, _: Any) -> None:
        kind, storage, key, _location, count, *view = self.stack.pop()
        if kind != "storage" or not isinstance(storage, GlobalName) or not storage.name.endswith("Storage"):
            raise RefusedPickle
        if any(part is not None for part in view):
            raise RefusedPickle
        record = StorageRecord(storage.name.rpartition(".")[2], key, count)
        self.storages.append(record)
        self.stack.append(record)


def _text(reader: _Reader, value: Any) -> None:
    reader.push(
        value.decode("utf-8") if isinstance(value, bytes) else value.encode("latin-1").decode("utf-8")
    )


def _unicode(reader: _Reader, value: str) -> None:
    value.encode()  # fails for half of a surrogate pair, which cannot be written to a file as UTF-8
    reader.push(value)


_ACTIONS: dict[str, Callable[[_Reader, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda reader, _: None),
    **dict.fromkeys(
        "BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT BINBYTES SHORT_BINBYTES BINBYTES8".split(), _Reader.push
    ),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _unicode),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), _text),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Reader.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda reader, index: reader.push(reader.memo[index])),
    "MEMOIZE": lambda reader, _: reader.put(len(reader.memo)),
    "NONE": lambda reader, _: reader.push(None),
    "NEWTRUE": lambda reader, _: reader.push(True),
    "NEWFALSE": lambda reader, _: reader.push(False),
    "MARK": _Reader.mark,
    "EMPTY_TUPLE": lambda reader, _: reader.push(()),
    "TUPLE": lambda reader, _: reader.push(tuple(reader.items())),
    "TUPLE1": lambda reader, _: reader.tuple_of(1),
    "TUPLE2": lambda reader, _: reader.tuple_of(2),
    "TUPLE3": lambda reader, _: reader.tuple_of(3),
    "EMPTY_LIST": lambda reader, _: reader.push([]),
    "APPEND": lambda reader, _: reader.extend([reader.stack.pop()]),
    "APPENDS": lambda reader, _: reader.extend(reader.items()),
    "EMPTY_SET": lambda reader, _: reader.push(Opaque("set")),
    "ADDITEMS": lambda reader, _: reader.extend(reader.items()),
    "EMPTY_DICT": lambda reader, _: reader.push(Pairs([])),
    "SETITEM": _Reader.set_item,
    "SETITEMS": _Reader.set_items,
    "GLOBAL": _Reader.global_named,
    "STACK_GLOBAL": _Reader.stack_global,
    "REDUCE": _Reader.reduce,
    "BUILD": _Reader.build,
    "BINPERSID": _Reader.persistent,
}
