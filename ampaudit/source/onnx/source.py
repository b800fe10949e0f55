"""Opens an ONNX file as a model, with its inputs."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from ampaudit.checkpoint.open import map_checkpoint
from ampaudit.core.errors import InputError, UsageError, first_line
from ampaudit.core.formats import LOW_PRECISION_NAMES
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.untrusted import MAX_MESSAGE, describe, describe_path, open_regular
from ampaudit.report.model import GIVEN, InputsInfo
from ampaudit.source.inputs import functions_of, inputs_from, unknown_axis
from ampaudit.source.interface import INPUT_SEED_OFFSET, Batch, BatchFactory, ModelSource
from ampaudit.source.onnx.files import read_onnx, torch_dtype_of
from ampaudit.source.onnx.model import OnnxModel
from ampaudit.trace.values import dtype_name

ARRAY_FILES = (".safetensors", ".npz")
_MAX_ELEMENTS = 1 << 25
_MAX_BYTES = 1 << 33  # of the arrays in an .npz file, which may be compressed
_BATCH, _LENGTH, _PIXELS = 1, 16, 224  # sizes for open axes of the graph
_INPUTS_HINT = (
    "pass --inputs FILE.py with example_inputs(), or arrays by name in FILE.safetensors or FILE.npz"
)
# operators that pass indices through
_PASS_THROUGH = frozenset("Cast Identity Reshape Unsqueeze Squeeze Flatten Transpose Slice Expand".split())
_LENGTHS = ("seq", "len", "token", "time", "past", "position")
_UNSUPPORTED_OPTIONS = {
    "weights": "contains its weights",
    "stream": "is memory-mapped already: its weights stay on disk until an op needs them",
}


def from_onnx(path: Path, options: SourceConfig, location: str) -> ModelSource:
    """Open a model, with inputs from --inputs or random ones of the graph's types.

    Raises:
        SourceError: See ``read_onnx``.
        InputError: The inputs do not match the graph.
    """
    for name, why in _UNSUPPORTED_OPTIONS.items():
        if getattr(options, name):
            raise UsageError(f"--{name}: {describe_path(path)} {why}", hint="leave the option out")
    model = OnnxModel(read_onnx(path))
    graph_inputs, functions = inputs_of(model.inputs), functions_of()
    make_batches: BatchFactory | None = None
    if options.inputs is None:
        make_batches = partial(random_batches, graph_inputs, options.batches or 1, options.seed)
        info = InputsInfo("random", f"random values of the graph's types: {describe_inputs(graph_inputs)}")
        batches = make_batches(options.input_sizes or {})
    elif options.inputs.suffix in ARRAY_FILES:
        batches, info = (read_arrays(options.inputs, graph_inputs),), GIVEN
    else:
        make_batches, functions, info = inputs_from(options, model, same_model=False)
        batches = make_batches(options.input_sizes or {})
    for number, batch in enumerate(batches if options.inputs is not None else ()):
        check_batch(batch, graph_inputs, batch.title(number))
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    stored = {tensor.dtype for tensor in model.state_dict().values()}
    dtype = next((name for name in LOW_PRECISION_NAMES if getattr(torch, name) in stored), None)
    return ModelSource(
        location,
        "onnx",
        model,
        batches,
        digest,
        inputs=info,
        make_batches=make_batches,
        dtype=dtype,
        **functions,
    )


@dataclass(frozen=True, slots=True)
class GraphInput:
    """An input of a graph."""

    name: str
    dtype: torch.dtype | None  # None if it is not a tensor
    sizes: tuple[int | str, ...] | None  # of the axes, names for open ones; None if the rank is open
    rows: int = 0  # of the smallest table that it indexes; 0 if it indexes none

    def __str__(self) -> str:
        dtype = dtype_name(self.dtype) if self.dtype is not None else "no tensor"
        sizes = "" if self.sizes is None else f"[{', '.join(map(str, self.sizes))}]"
        return describe(f"{self.name} {dtype}{sizes}")


def inputs_of(values: Sequence[ir.Value]) -> list[GraphInput]:
    """Return the declared inputs of a graph."""
    inputs: list[GraphInput] = []
    for value in values:
        is_tensor = isinstance(value.type, ir.TensorType)
        dtype = torch_dtype_of(value.dtype) if is_tensor and value.dtype is not None else None
        sizes: tuple[int | str, ...] | None = None
        if value.shape is not None:
            sizes = tuple(
                size if isinstance(size, int) else str(size.value or f"{value.name}[{axis}]")
                for axis, size in enumerate(value.shape)
            )
        inputs.append(GraphInput(str(value.name), dtype, sizes, _rows(value)))
    return inputs


def _rows(value: ir.Value) -> int:
    """Return the size of the smallest axis that a value indexes; 0 if it indexes none."""
    pending, visited, table_sizes = [value], {value}, []
    while pending:
        for node, index in pending.pop().uses():
            if not node.domain and node.op_type in ("Gather", "GatherElements") and index == 1:
                table, place = node.inputs[0], node.attributes.get_int("axis", 0)
                if table is not None and table.shape is not None and -1 <= place < len(table.shape):
                    table_sizes.append(table.shape[place])
            elif node.op_type in _PASS_THROUGH and index == 0:
                new = [output for output in node.outputs if output not in visited]
                pending += new
                visited.update(new)
    return min((size for size in table_sizes if isinstance(size, int)), default=0)


def describe_inputs(inputs: Sequence[GraphInput]) -> str:
    """Describe inputs by name, type and sizes, for a message."""
    return describe(", ".join(map(str, inputs)) or "no input", MAX_MESSAGE - 20)


def random_batches(
    inputs: Sequence[GraphInput], count: int, seed: int, sizes: Mapping[str, int]
) -> tuple[Batch, ...]:
    """Generate inputs of the graph's types: normal floats, valid indices, and masks of ones.

    ``sizes`` overrides those of open axes, by name.

    Raises:
        InputError: An input is not a tensor, or too large.
        UsageError: No axis has such a name.
    """
    axes = dict.fromkeys(size for spec in inputs for size in spec.sizes or () if isinstance(size, str))
    for axis in sizes:
        if axis not in axes:
            raise unknown_axis(axis, list(axes), "all sizes of this graph are fixed")
    axis_sizes = {name: size for spec in inputs for name, size in _open_sizes(spec)} | dict(sizes)
    torch.manual_seed(seed + INPUT_SEED_OFFSET)
    return tuple(
        batch_of(inputs, {spec.name: _random_tensor(spec, axis_sizes) for spec in inputs})
        for _ in range(count)
    )


def batch_of(inputs: Sequence[GraphInput], tensors: Mapping[str, torch.Tensor]) -> Batch:
    """Build a batch from tensors named after the graph's inputs."""
    if "self" in tensors:  # cannot be passed to a module's call by name
        return Batch(tuple(tensors[spec.name] for spec in inputs))
    return Batch((), dict(tensors))


def by_name(batch: Batch, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch by name, given the names of the graph's inputs in order."""
    return {**dict(zip(names, batch.args, strict=False)), **batch.kwargs}


def _open_sizes(spec: GraphInput) -> Iterator[tuple[str, int]]:
    sizes = spec.sizes or ()
    is_image = len(sizes) == 4 and spec.dtype is not None and spec.dtype.is_floating_point
    for axis, name in enumerate(sizes):
        if isinstance(name, str):
            if axis == 0 or "batch" in name.lower():
                yield name, _BATCH
            elif is_image and axis >= 2 and not any(word in name.lower() for word in _LENGTHS):
                yield name, _PIXELS
            else:
                yield name, _LENGTH


def size_of(size: int | str, axis_sizes: Mapping[str, int]) -> int:
    """Resolve the size of an axis, which may be a sum of others, such as ``past + 1``."""
    if isinstance(size, int):
        return size
    if is_sum(size, axis_sizes):
        parts = [part.strip() for part in size.split("+")]
        return sum(int(part) if part.isdecimal() else axis_sizes[part] for part in parts)
    return axis_sizes[size]


def is_sum(size: str, axes: Collection[str]) -> bool:
    """Return whether a size is a sum of numbers and these axes."""
    parts = [part.strip() for part in size.split("+")]
    return len(parts) > 1 and all(part.isdecimal() or part in axes for part in parts)


def _random_tensor(spec: GraphInput, axis_sizes: Mapping[str, int]) -> torch.Tensor:
    if spec.dtype is None or spec.sizes is None:
        what = "is not a tensor" if spec.dtype is None else "has no sizes"
        raise InputError(f"the input {describe(spec.name)!r} {what}", hint=_INPUTS_HINT)
    shape, elements = [size_of(size, axis_sizes) for size in spec.sizes], 1
    for size in shape:
        elements *= size
        if size < 0 or elements > _MAX_ELEMENTS:
            raise InputError(f"cannot generate the input {describe(str(spec))}", hint=_INPUTS_HINT)
    name = spec.name.lower()
    if spec.dtype == torch.bool or "mask" in name:
        return torch.ones(shape, dtype=spec.dtype)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        wide = spec.dtype if spec.dtype.itemsize > 2 else torch.float32
        return torch.randn(shape, dtype=wide).to(spec.dtype)
    if "position" in name and shape:
        return (torch.arange(shape[-1]) % (spec.rows or shape[-1] or 1)).expand(shape).to(spec.dtype).clone()
    is_image = spec.dtype == torch.uint8 and len(shape) > 2
    return torch.randint(0, spec.rows or (256 if is_image else 2), shape).to(spec.dtype)


def read_arrays(path: Path, inputs: Sequence[GraphInput]) -> Batch:
    """Read a batch from a file of arrays named after the graph's inputs.

    Raises:
        InputError, WeightsError: The file cannot be read.
    """
    arrays = map_checkpoint(path).tensors if path.suffix == ".safetensors" else _npz(path)
    if set(arrays) == {f"input[{index}]" for index in range(len(inputs))}:
        arrays = {spec.name: arrays[f"input[{index}]"] for index, spec in enumerate(inputs)}
    if set(arrays) != {spec.name for spec in inputs}:
        what = f"{describe_path(path)} holds {describe(', '.join(sorted(arrays)) or 'nothing')}"
        raise InputError(what, hint=f"the graph takes {describe_inputs(inputs)}")
    return batch_of(inputs, arrays)


def _npz(path: Path) -> dict[str, torch.Tensor]:
    try:
        with os.fdopen(open_regular(path, InputError), "rb") as stream:
            with zipfile.ZipFile(stream) as archive:
                size = sum(member.file_size for member in archive.infolist())
            if size > _MAX_BYTES:
                raise ValueError(f"it holds {size:,} bytes; {_MAX_BYTES:,} are allowed")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except InputError:
        raise
    except Exception as error:  # whatever the parsers raise
        what = f"{describe_path(path)}: cannot be read: {describe(first_line(error), 100)}"
        raise InputError(what, hint="save it with numpy.savez") from error


def check_batch(batch: Batch, inputs: Sequence[GraphInput], title: str) -> None:
    """Check the names, types and sizes of a batch against the inputs of a graph.

    Raises:
        InputError: The batch does not match.
    """
    hint = f"the graph takes {describe_inputs(inputs)}"
    names = [spec.name for spec in inputs]
    values = by_name(batch, names)
    if len(batch.args) + len(batch.kwargs) != len(names) or set(values) != set(names):
        got = describe(", ".join(map(str, batch.kwargs)) or f"{len(batch.args)} in order")
        raise InputError(f"{title} has other inputs: {got}", hint=hint)
    sizes: dict[str, int] = {}
    for spec in inputs:
        value, name = values[spec.name], describe(spec.name)
        if spec.dtype is None:
            continue
        if not isinstance(value, torch.Tensor):
            raise InputError(f"{title}: {name} is of type {type(value).__name__}", hint=hint)
        if value.dtype != spec.dtype:
            raise InputError(f"{title}: {name} is {value.dtype}".replace("torch.", ""), hint=hint)
        shape = list(value.shape)
        fits = spec.sizes is None or len(shape) == len(spec.sizes)
        for declared, size in zip(spec.sizes or (), shape, strict=False):
            expected = sizes.setdefault(declared, size) if isinstance(declared, str) else declared
            fits = fits and expected == size
        if not fits:
            raise InputError(f"{title}: {name} has the sizes {shape}", hint=hint)
