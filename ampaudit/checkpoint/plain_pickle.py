"""Reads pickles of plain data and tensors as data: nothing is imported, called or constructed.

Opcodes are those of the pickle module (protocols 2 to 4, what torch.save writes of state dicts and training
checkpoints). What a pickle would import is looked up in a table of names that stand for inert values.

``torch.load(weights_only=True)`` is no substitute: it reads no pickle of protocol 4, refuses a checkpoint
for one quantized tensor, hashes the keys that the file chooses, and would have to run in a confined
process, whose import of torch takes longer than reading the file.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from ampaudit.core.untrusted import describe

__all__ = [
    "MAX_PICKLE",
    "CodeNeeded",
    "GlobalName",
    "Opaque",
    "Pairs",
    "RefusedPickle",
    "StorageRecord",
    "TensorRecord",
    "interpret",
]


MAX_PICKLE = 64_000_000  # bytes
_SAVE_AGAIN = "torch.save model.state_dict() only, or use safetensors"
MAX_OPCODES = 3_000_000  # 90,000 tensors; each may take some 100 bytes of memory


class Pairs:
    """A dict as pairs: hashing what somebody else chose as keys could take forever."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: list[tuple[Any, Any]]) -> None:
        self.pairs = pairs

    def get(self, name: str) -> Any:
        """Return the value of a name, the last if it occurs more than once; ``None`` without one."""
        return next((value for key, value in reversed(self.pairs) if type(key) is str and key == name), None)


class Opaque(NamedTuple):
    """Something whose value is not needed, such as a set or a sparse tensor."""

    name: str


class StorageRecord(NamedTuple):
    """The bytes of tensors: their key in the archive, type and number of elements."""

    kind: str
    key: Any
    count: Any


class TensorRecord(NamedTuple):
    """A tensor in a storage, with everything as the file has it: unchecked."""

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


def _table(*given: Any) -> Pairs:
    pairs = given[0] if given else []
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
    if not function.name.startswith("torch._utils._rebuild_"):  # neither itself nor what copies its argument
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
    """Raised for a pickle that is damaged, or more than plain data; the message quotes nothing raw."""

    def __init__(
        self, message: str = "its pickle is damaged", hint: str = "download or save it again"
    ) -> None:
        super().__init__(message)
        self.hint = hint


class CodeNeeded(RefusedPickle):
    """Raised for a pickle that imports more than plain data need, such as the class of a module."""


def interpret(stream: BinaryIO, storages: list[StorageRecord]) -> Any:
    """Return what a pickle holds: plain data, ``Pairs``s, ``TensorRecord``s and ``Opaque``s.

    The stream is read to the end of the pickle. ``storages`` receives every storage that the pickle names.

    Raises:
        RefusedPickle: The pickle is damaged, or needs a class or function that plain data do not need.
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
        """Return what is above the mark."""
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
        # a container may be given to any number of functions that copy it
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
    value.encode()  # fails for half of a surrogate pair, which pickles may hold and files may not
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
