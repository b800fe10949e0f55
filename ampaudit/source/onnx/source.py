"""Opens an ONNX file as a model, with its inputs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from ampaudit.core.errors import SourceError
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.untrusted import describe
from ampaudit.report.inputs import InputsInfo
from ampaudit.source.inputs import functions_of, inputs_from
from ampaudit.source.interface import INPUT_SEED_OFFSET, Batch, ModelSource
from ampaudit.source.onnx.files import read_onnx, torch_dtype_of
from ampaudit.source.onnx.model import OnnxModel

__all__ = ["from_onnx"]


def from_onnx(path: Path, options: SourceConfig, location: str) -> ModelSource:
    """Open a model, with inputs from --inputs or made from the types of the graph.

    Raises:
        SourceError: see ``read_onnx``.
    """
    file = read_onnx(path)
    model = OnnxModel(file)
    functions, sized = functions_of(), None
    if options.inputs:
        sized, functions, info = inputs_from(options, model, same_model=False)
        batches = sized(options.input_sizes or {})
    else:
        batches, info = (
            _made_inputs(model, options),
            InputsInfo("random", "random values of the graph's types"),
        )
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return ModelSource(location, "onnx", model, batches, digest, inputs=info, sized=sized, **functions)


def _made_inputs(model: OnnxModel, options: SourceConfig) -> tuple[Batch, ...]:
    torch.manual_seed(options.seed + INPUT_SEED_OFFSET)
    batches = []
    for _ in range(options.batches or 1):
        given = {}
        for value in model.inputs:
            dtype = torch_dtype_of(value.dtype) if value.dtype is not None else None
            if dtype is None or value.shape is None:
                raise SourceError(f"the input {describe(value.name)!r} has no type", hint="pass --inputs")
            shape = [size if isinstance(size, int) else 1 for size in value.shape]
            floats = dtype.is_floating_point
            given[str(value.name)] = (
                torch.randn(shape).to(dtype) if floats else torch.ones(shape, dtype=dtype)
            )
        batches.append(Batch((), given))
    return tuple(batches)
