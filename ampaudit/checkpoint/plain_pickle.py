"""Reads pickles of plain data and tensors as data: nothing is imported, called or constructed.

Opcodes are those of the pickle module (protocols 2 to 4, what torch.save writes of state dicts and training
checkpoints). What a pickle would import is looked up in a table of names that stand for inert values.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, BinaryIO

from ampaudit.checkpoint.stand_ins import STAND_INS, GlobalName, Opaque, Pairs, StorageRecord, TensorRecord
from ampaudit.core.untrusted import describe

__all__ = ["MAX_PICKLE", "CodeNeeded", "RefusedPickle", "interpret"]

MAX_PICKLE = 64_000_000  # bytes
_SAVE_AGAIN = "torch.save model.state_dict() only, or use safetensors"
MAX_OPCODES = 3_000_000  # 90,000 tensors; each may take some 100 bytes of memory


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

    Args:
        stream: read to the end of the pickle, not of the stream.
        storages: gets every storage that is named.

    Raises:
        RefusedPickle: it is damaged, or needs a class or function that plain data do not need.
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
    __slots__ = ("copied", "marked", "memo", "stack", "storages")

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
        found, self.stack = self.stack, self.marked.pop()
        return found

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def put(self, index: int) -> None:
        if index > MAX_OPCODES:
            raise RefusedPickle
        self.memo[index] = self.stack[-1]

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def get(self, index: int) -> None:
        self.stack.append(self.memo[index])

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise RefusedPickle
        self.stack[len(self.stack) - count :] = [tuple(self.stack[len(self.stack) - count :])]

    def tuple_of_items(self, _: Any) -> None:
        self.push(tuple(self.items()))

    def append(self, _: Any) -> None:
        value = self.stack.pop()
        self.extend([value])

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
        (
            *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
            *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
        ),
        _Reader.push,
    ),
    **dict.fromkeys(("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _unicode),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), _text),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Reader.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Reader.get),
    "MEMOIZE": _Reader.memoize,
    "NONE": lambda reader, _: reader.push(None),
    "NEWTRUE": lambda reader, _: reader.push(True),
    "NEWFALSE": lambda reader, _: reader.push(False),
    "MARK": _Reader.mark,
    "EMPTY_TUPLE": lambda reader, _: reader.push(()),
    "TUPLE": _Reader.tuple_of_items,
    "TUPLE1": lambda reader, _: reader.tuple_of(1),
    "TUPLE2": lambda reader, _: reader.tuple_of(2),
    "TUPLE3": lambda reader, _: reader.tuple_of(3),
    "EMPTY_LIST": lambda reader, _: reader.push([]),
    "APPEND": _Reader.append,
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
