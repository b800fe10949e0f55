"""Reads an ONNX file as data: its graph, and its tensors mapped into memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ampaudit.checkpoint.archive import map_privately
from ampaudit.core.errors import SourceError
from ampaudit.core.untrusted import describe, describe_path
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
_SAVE_AGAIN = "export or download it again"


@dataclass(slots=True)
class OnnxFile:
    """An ONNX model with its tensors, which stay in their files until they are read.

    Attributes:
        path: of the file.
        model: its graph; tensors in it must be read through ``tensor``.
    """

    path: Path
    model: ir.Model
    _mappings: dict[Path, mmap.mmap] = field(default_factory=dict)
    _read: dict[tuple[Path, int, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def reopened(self) -> OnnxFile:
        """Return the model as it is in the file, with the same tensors in memory."""
        again = read_onnx(self.path)
        again._mappings, again._read = self._mappings, self._read
        return again

    def tensor(self, value: ir.TensorProtocol) -> torch.Tensor:
        """Return the values of a tensor, mapped where their place in the file is aligned.

        Raises:
            SourceError: its data is elsewhere, shorter than it says, or of a type that torch lacks.
        """
        import onnx_ir as ir

        dtype = torch_dtype_of(value.dtype)
        shape = tuple(int(size) for size in value.shape.numpy())
        if not isinstance(value, ir.ExternalTensor):
            array = value.numpy()
            if dtype is None or array.dtype.name in ("bfloat16",) or "float8" in array.dtype.name:
                return _from_bytes(value.tobytes(), dtype, shape, array)
            return torch.from_numpy(array.copy()).reshape(shape)
        if dtype is None:
            raise self._fault(f"the tensor {describe(value.name)!r} has the type {value.dtype.name}")
        mapping = self._mapping(value)
        start, elements = value.offset or 0, math.prod(shape)
        size = elements * dtype.itemsize
        length = size if value.length is None else value.length
        if start < 0 or length != size or start + size > len(mapping):
            raise self._fault(
                f"the tensor {describe(value.name)!r} of {size:,} bytes lies outside its data "
                f"({length:,} bytes from {start:,} of {len(mapping):,})"
            )
        if not elements:
            return torch.empty(shape, dtype=dtype)
        key = (self._path_of(value), start, dtype)
        if key not in self._read:
            flat = torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=start)
            if start % dtype.itemsize:
                flat = flat.clone()  # kernels may want aligned values
                _forget(mapping, start, size)
            self._read[key] = flat.view(dtype)
        return self._read[key][:elements].view(shape)

    def constant(self, node: ir.Node) -> torch.Tensor:
        """Return the value of a Constant node.

        Raises:
            SourceError: it is text, or not there.
        """
        for name, attribute in node.attributes.items():
            if name == "value":
                return self.tensor(attribute.value)
            if name in ("value_float", "value_floats"):
                return torch.tensor(attribute.value, dtype=torch.float32)
            if name in ("value_int", "value_ints"):
                return torch.tensor(attribute.value, dtype=torch.int64)
        raise self._fault(f"the constant {describe(node.name or node.outputs[0].name)!r} is not a number")

    @property
    def shown(self) -> str:
        """The path for messages."""
        return describe_path(self.path)

    def graphs(self) -> Iterator[ir.Graph | ir.Function]:
        """Return the graph, the bodies inside it, and the model's functions."""
        yield self.model.graph
        yield from self.model.graph.subgraphs()
        for function in self.model.functions.values():
            yield function
            yield from function.subgraphs()

    def nodes(self) -> Iterator[ir.Node]:
        """Return the nodes of all graphs."""
        for graph in self.graphs():
            yield from graph

    def version(self, node: ir.Node) -> int:
        """Return the version of the operator set that a node belongs to."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        if node.version is not None:
            return node.version
        return self.model.opset_imports.get(domain, 1)

    def _mapping(self, value: ir.ExternalTensor) -> mmap.mmap:
        path = self._path_of(value)
        if path not in self._mappings:
            self._mappings[path] = map_privately(path, SourceError)
        return self._mappings[path]

    def _path_of(self, value: ir.ExternalTensor) -> Path:
        location = str(value.location)
        return self.path if location == OWN_FILE else self._inside(location, str(value.name))

    def _inside(self, location: str, name: str) -> Path:
        """Return the file of external data, which must be in the model's directory."""
        folder = self.path.parent.resolve()
        shown = f"the data of {describe(name)!r}"
        try:
            path = (folder / location).resolve()
        except (OSError, ValueError, RuntimeError):
            raise self._fault(f"{shown} is in {describe(location)}, which is no path") from None
        if path == folder or not path.is_relative_to(folder):
            raise self._fault(
                f"{shown} is outside its directory: {describe(location)}",
                "move the data beside the model, and save it with a relative location",
            )
        if not path.is_file():
            raise self._fault(f"{shown} is missing: {describe(location)}", "copy the data beside the model")
        return path

    def _fault(self, what: str, hint: str = _SAVE_AGAIN) -> SourceError:
        return SourceError(f"{describe_path(self.path)}: {what}", hint=hint)


def torch_dtype_of(dtype: ir.DataType) -> torch.dtype | None:
    """Return the dtype of torch; ``None`` for strings and numbers of less than eight bits."""
    return _DTYPES.get(dtype.name)


def read_onnx(path: Path) -> OnnxFile:
    """Read a model; its tensors stay where they are.

    Raises:
        SourceError: missing, truncated, or not an ONNX model.
    """
    import onnx
    import onnx_ir as ir

    if not path.is_file():
        raise SourceError(f"no such file: {describe_path(path)}", hint="check the path of the .onnx file")
    mapping = map_privately(path, SourceError)
    try:
        proto = onnx.ModelProto()
        proto.ParseFromString(without_large_values(mapping))
        model = ir.from_proto(proto)
    except Exception as error:  # whatever the parser raises
        what = f"is not an ONNX model, or damaged: {describe(error, 150)}"
        raise SourceError(f"{describe_path(path)} {what}", hint=_SAVE_AGAIN) from error
    assert isinstance(model, ir.Model)
    found = OnnxFile(path, model)
    found._mappings[path] = mapping
    return found


def _from_bytes(
    data: bytes, dtype: torch.dtype | None, shape: tuple[int, ...], array: object
) -> torch.Tensor:
    """Return a tensor of a type that NumPy lacks; numbers of four bits become int8."""
    import numpy as np

    if dtype is None:
        assert isinstance(array, np.ndarray)
        return torch.from_numpy(array.astype(np.int8)).reshape(shape)
    return (
        torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
        if data
        else torch.empty(shape, dtype=dtype)
    )


def _forget(mapping: mmap.mmap, start: int, size: int) -> None:
    """Release the pages of values that were copied."""
    if hasattr(mmap, "MADV_DONTNEED"):
        begin, end = start // mmap.PAGESIZE * mmap.PAGESIZE, start + size
        mapping.madvise(mmap.MADV_DONTNEED, begin, end - begin)
