"""Reads an ONNX file as data: its graph, and its tensors mapped into memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ampaudit.checkpoint.archive import map_privately
from ampaudit.core.errors import SourceError
from ampaudit.core.untrusted import MAX_MESSAGE, describe, describe_path
from ampaudit.source.onnx.checks import BadGraph, check_model, first_in_cycle, node_title
from ampaudit.source.onnx.names import plain_domain
from ampaudit.source.onnx.wire import OWN_FILE, without_large_values

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["OnnxFile", "read_onnx", "torch_dtype_of"]

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
    """An ONNX model whose tensors stay in their files until they are read.

    Attributes:
        path: Path of the file.
        model: The model; its tensors must be read through ``tensor``.
    """

    path: Path
    model: ir.Model
    _mappings: dict[Path, mmap.mmap] = field(default_factory=dict)
    _read: dict[tuple[Path, int, int, int], torch.Tensor] = field(default_factory=dict)

    def reopened(self) -> OnnxFile:
        """Read the model again, sharing the tensors in memory."""
        again = read_onnx(self.path)
        again._mappings, again._read = self._mappings, self._read
        return again

    def tensor(self, value: ir.TensorProtocol, place: str = "") -> torch.Tensor:
        """Return the values of a tensor, memory-mapped if they are aligned in the file.

        Four-bit numbers become int8. Errors name a tensor without a name by its ``place``.

        Raises:
            SourceError: The data is missing, of the wrong size, or of a type that torch lacks.
        """
        import onnx_ir as ir

        name = describe(getattr(value, "name", "") or place)
        if not isinstance(getattr(value, "dtype", None), ir.DataType):
            raise self._fault(f"the constant {name!r} is not a tensor")
        half = value.dtype.name in _HALF_BYTES
        dtype = torch.uint8 if half else torch_dtype_of(value.dtype)
        if dtype is None:
            raise self._fault(f"the tensor {name!r} has the type {value.dtype.name}", _NO_TYPE)
        shape = tuple(int(size) for size in value.shape.numpy())
        elements = math.prod(shape)
        if (
            min(shape, default=0) < 0
            or len(shape) > _MAX_RANK
            or math.prod(max(size, 1) for size in shape) >> 60
        ):
            raise self._fault(f"the tensor {name!r} has the shape {describe(list(shape))}")
        size = -(-elements // 2) if half else elements * dtype.itemsize
        if isinstance(value, ir.ExternalTensor):
            flat = self._mapped(value, size, dtype.itemsize)
        else:
            try:
                data = value.tobytes()
            except (ValueError, TypeError, OverflowError) as error:
                raise self._fault(f"the tensor {name!r}: {describe(error)}") from error
            if len(data) != size:
                raise self._fault(f"the tensor {name!r} of {size:,} bytes has {len(data):,}")
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        if not elements:
            return torch.empty(shape, dtype=torch.int8 if half else dtype)
        if half:
            return _unpacked(flat, elements, signed=value.dtype.name == "INT4").view(shape)
        if dtype == torch.bool:
            return (flat != 0).view(shape)
        return flat.view(dtype).view(shape)

    def _mapped(self, value: ir.ExternalTensor, size: int, alignment: int) -> torch.Tensor:
        path = self._path_of(value)
        if path not in self._mappings:
            self._mappings[path] = map_privately(path, SourceError)
        mapping, start = self._mappings[path], value.offset or 0
        length = size if value.length is None else value.length
        if start < 0 or length != size or start + size > len(mapping):
            raise self._fault(
                f"the tensor {describe(value.name)!r} of {size:,} bytes lies outside its data "
                f"({length:,} bytes from {start:,} of {len(mapping):,})"
            )
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        key = (path, start, size, alignment)
        if key not in self._read:
            flat = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)
            if start % alignment:
                flat = flat.clone()  # kernels may require alignment
                _forget(mapping, start, size)
            self._read[key] = flat
        return self._read[key]

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
        raise self._fault(f"the constant {describe(node.name or node.outputs[0].name)!r} is not a number")

    @property
    def displayed_path(self) -> str:
        """The path of the file for messages."""
        return describe_path(self.path)

    def graphs(self) -> Iterator[ir.Graph | ir.Function]:
        """Yield the graph, the bodies inside it, and the model's functions."""
        yield self.model.graph
        yield from self.model.graph.subgraphs()
        for function in self.model.functions.values():
            yield function
            yield from function.subgraphs()

    def nodes(self) -> Iterator[ir.Node]:
        """Yield the nodes of all graphs."""
        for graph in self.graphs():
            yield from graph

    def version(self, node: ir.Node) -> int:
        """Return the version of a node's operator set."""
        if node.version is not None:
            return node.version
        return self.model.opset_imports.get(plain_domain(node.domain), 1)

    def _path_of(self, value: ir.ExternalTensor) -> Path:
        location = str(value.location)
        return self.path if location == OWN_FILE else self._inside(location, str(value.name))

    def _inside(self, location: str, name: str) -> Path:
        """Return the path of external data, which must lie in the model's directory."""
        folder = self.path.parent.resolve()
        what = f"the data of {describe(name)!r}"
        try:
            path = (folder / location).resolve()
            exists = path.is_file()
        except (OSError, ValueError, RuntimeError):
            raise self._fault(f"{what} is in {describe(location)}, which is no path") from None
        if path == folder or not path.is_relative_to(folder):
            raise self._fault(
                f"{what} is outside its directory: {describe(location) or 'no file is named'}",
                "copy the data beside the model (no link), and name it by a relative location",
            )
        if not exists:
            raise self._fault(f"{what} is missing: {describe(location)}", "copy that file beside the model")
        return path

    def _fault(self, what: str, hint: str = _SAVE_AGAIN) -> SourceError:
        return SourceError(describe(f"{self.path}: {what}", MAX_MESSAGE), hint=hint)


def torch_dtype_of(dtype: ir.DataType) -> torch.dtype | None:
    """Return the torch dtype; ``None`` for strings and numbers of less than eight bits."""
    return _DTYPES.get(dtype.name)


def read_onnx(path: Path) -> OnnxFile:
    """Read a model, leaving its tensors in their files.

    Raises:
        SourceError: The file is missing, truncated, or not an ONNX model.
    """
    onnx, ir = _packages(path)
    if not path.exists():
        raise SourceError(f"no such file: {describe_path(path)}", hint="check the path of the .onnx file")
    mapping = map_privately(path, SourceError)
    if mapping[: len(_POINTER)] == _POINTER:
        raise SourceError(f"{describe_path(path)} is a pointer of Git LFS", hint="git lfs pull")
    try:
        proto = onnx.ModelProto()
        proto.ParseFromString(without_large_values(mapping))
        check_model(proto)
        model = ir.from_proto(proto)
        for graph in (model.graph, *model.functions.values()):
            _sort(graph)
    except BadGraph as error:
        raise SourceError(describe(f"{path}: {error}", MAX_MESSAGE), hint=error.hint) from error
    except Exception as error:  # whatever the parser raises
        what = f"is not an ONNX model, or damaged: {describe(_cause(error), 100)}"
        raise SourceError(f"{describe_path(path)} {what}", hint=_SAVE_AGAIN) from error
    file = OnnxFile(path, model)
    file._mappings[path] = mapping
    return file


def _packages(path: Path) -> tuple[Any, Any]:
    try:
        import onnx
        import onnx_ir
    except ImportError as error:
        what = f"{describe_path(path)}: reading ONNX needs the package {error.name or 'onnx'}"
        raise SourceError(what, hint="pip install 'ampaudit[onnx]'") from error
    return onnx, onnx_ir


def _sort(graph: ir.Graph | ir.Function) -> None:
    """Sort nodes topologically."""
    try:
        graph.sort()
    except ValueError:
        node = first_in_cycle([*graph])
        name = "a node" if node is None else node_title(node.name or node.outputs[0].name or "", node.op_type)
        raise BadGraph(f"{name} needs its own result") from None


def _cause(error: BaseException) -> BaseException:
    """Return the root cause of an exception."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _unpacked(flat: torch.Tensor, elements: int, *, signed: bool) -> torch.Tensor:
    """Unpack four-bit numbers to int8, the lower half of each byte first."""
    pairs = torch.stack([flat & 15, flat >> 4], -1).view(-1)[:elements].to(torch.int8)
    return (pairs ^ 8) - 8 if signed else pairs


def _forget(mapping: mmap.mmap, start: int, size: int) -> None:
    """Release the pages of copied values."""
    if hasattr(mmap, "MADV_DONTNEED"):
        begin, end = start // mmap.PAGESIZE * mmap.PAGESIZE, start + size
        mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)
