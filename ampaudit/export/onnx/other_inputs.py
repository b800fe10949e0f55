"""Runs a converted ONNX file on inputs that nobody gave: other values, and larger sizes of open axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ampaudit.core.errors import AuditError, RunFailed
from ampaudit.export.config import ConvertConfig
from ampaudit.export.onnx.outputs import least_accuracy, outputs_of
from ampaudit.source import Batch, ModelSource
from ampaudit.source.onnx.inputs import GraphInput, batch_of, by_name, inputs_of, size_of
from ampaudit.source.onnx.model import OnnxModel
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.isolation import call_unchanged

__all__ = ["faults_on_other_inputs"]

_MOST_ELEMENTS = 1 << 22  # of an input


def faults_on_other_inputs(source: ModelSource, path: Path, config: ConvertConfig) -> Iterator[str]:
    """Describe what a written file computes wrongly on inputs beside those of the audit.

    Inputs that the original refuses, or on which its outputs are not finite, are left out.
    """
    assert isinstance(source.model, OnnxModel)
    inputs = inputs_of(source.model.inputs)
    for what, batch in _other_batches(inputs, source.batches[0], config.seed):
        try:
            exact = call_unchanged(source.model, batch.args, batch.kwargs, seed=config.seed)
        except Exception:  # whatever torch says of sizes that do not fit together
            continue
        if not all(tensor.isfinite().all() for tensor in tensor_leaves((), dict(exact))):
            continue
        try:
            accuracy = least_accuracy(outputs_of(replace(source, batches=(batch,)), path, config))
        except RunFailed as failed:
            yield f"with {what}, {failed.args[0]}"
        except AuditError:
            continue
        else:
            if accuracy < config.min_sqnr:
                yield f"with {what}, an output has {accuracy:.0f} dB against FP32"


def _other_batches(inputs: Sequence[GraphInput], batch: Batch, seed: int) -> Iterator[tuple[str, Batch]]:
    """Yield batches made from a given one, each with words for what is different."""
    values = by_name(batch, [given.name for given in inputs])
    random = torch.Generator().manual_seed(seed)
    yield (
        "other values",
        batch_of(inputs, {given.name: _shuffled(given, values[given.name], random) for given in inputs}),
    )
    sizes = {
        name: size
        for given in inputs
        for name, size in zip(given.sizes or (), values[given.name].shape, strict=True)
        if isinstance(name, str)
    }
    if sizes:
        larger = {name: 3 * size + 1 for name, size in sizes.items() if "+" not in name}
        tiled = {given.name: _tiled(given, values[given.name], larger) for given in inputs}
        if all(tensor.numel() <= _MOST_ELEMENTS for tensor in tiled.values()):
            what = ", ".join(f"{name} = {size}" for name, size in larger.items())
            yield f"larger sizes ({what})", batch_of(inputs, tiled)


def _shuffled(given: GraphInput, value: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Return the elements in another order; of indices, others of the table."""
    if given.rows and not value.is_floating_point():
        return torch.randint(0, given.rows, value.shape, generator=random).to(value.dtype)
    if not value.is_floating_point():
        return value  # masks and lengths belong to each other
    return value.reshape(-1)[torch.randperm(value.numel(), generator=random)].reshape(value.shape)


def _tiled(given: GraphInput, value: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
    """Return an input whose open axes have other sizes: its elements again and again."""
    for axis, size in enumerate(given.sizes or ()):
        if value.shape[axis]:
            wanted = size_of(size, sizes)
            value = value.index_select(axis, torch.arange(wanted) % value.shape[axis])
    return value
