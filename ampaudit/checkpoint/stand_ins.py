"""What a pickle of tensors names: inert values in place of the classes and functions of its names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["STAND_INS", "GlobalName", "Opaque", "Pairs", "StorageRecord", "TensorRecord"]


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
            *(
                "builtins.set",
                "builtins.frozenset",
                "builtins.bytes",
                "builtins.bytearray",
                "builtins.complex",
            ),
        )
    },
    **{
        f"torch.{name}": None
        for name in (
            *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16"),
            *("bfloat16", "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn"),
            *("float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
            *("quint8", "qint8", "qint32", "quint4x2", "quint2x4", "per_tensor_affine", "per_channel_affine"),
            *("per_tensor_symmetric", "per_channel_symmetric", "per_channel_affine_float_qparams"),
            *("storage.UntypedStorage", "UntypedStorage", "BoolStorage", "ByteStorage", "CharStorage"),
            *("ShortStorage", "IntStorage", "LongStorage", "HalfStorage", "BFloat16Storage", "FloatStorage"),
            *("DoubleStorage", "ComplexFloatStorage", "ComplexDoubleStorage", "QUInt8Storage"),
            *("QInt8Storage", "QInt32Storage", "QUInt4x2Storage", "QUInt2x4Storage"),
        )
    },
}
