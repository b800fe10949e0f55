"""Opens an ONNX file as a model, with its inputs."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import torch

from ampaudit.core.errors import UsageError
from ampaudit.core.formats import LOW_PRECISION_NAMES
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.untrusted import describe_path
from ampaudit.report.inputs import GIVEN, InputsInfo
from ampaudit.source.inputs import functions_of, inputs_from
from ampaudit.source.interface import ModelSource, Sized
from ampaudit.source.onnx.files import read_onnx
from ampaudit.source.onnx.inputs import (
    ARRAY_FILES,
    arrays_in,
    check_batch,
    describe_inputs,
    inputs_of,
    random_batches,
)
from ampaudit.source.onnx.model import OnnxModel

__all__ = ["from_onnx"]

_REFUSED = {
    "weights": "has its own weights",
    "stream": "is mapped: its weights stay on disk until an op needs them",
}


def from_onnx(path: Path, options: SourceConfig, location: str) -> ModelSource:
    """Open a model, with inputs from --inputs or random ones of the graph's types.

    Raises:
        SourceError: See ``read_onnx``.
        InputError: The inputs do not match the graph.
    """
    for name, why in _REFUSED.items():
        if getattr(options, name):
            raise UsageError(f"--{name}: {describe_path(path)} {why}", hint="leave the option out")
    model = OnnxModel(read_onnx(path))
    graph_inputs, functions = inputs_of(model.inputs), functions_of()
    sized: Sized | None = None
    if options.inputs is None:
        sized = partial(random_batches, graph_inputs, options.batches or 1, options.seed)
        info = InputsInfo("random", f"random values of the graph's types: {describe_inputs(graph_inputs)}")
        batches = sized(options.input_sizes or {})
    elif options.inputs.suffix in ARRAY_FILES:
        batches, info = (arrays_in(options.inputs, graph_inputs),), GIVEN
    else:
        sized, functions, info = inputs_from(options, model, same_model=False)
        batches = sized(options.input_sizes or {})
    for number, batch in enumerate(batches if options.inputs is not None else (), 1):
        check_batch(batch, graph_inputs, batch.title(number))
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    stored = {tensor.dtype for tensor in model.state_dict().values()}
    dtype = next((name for name in LOW_PRECISION_NAMES if getattr(torch, name) in stored), None)
    return ModelSource(
        location, "onnx", model, batches, digest, inputs=info, sized=sized, dtype=dtype, **functions
    )
