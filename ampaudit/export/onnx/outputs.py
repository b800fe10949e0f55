"""Runs a written ONNX file in lock-step, and compares its outputs with the original's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ampaudit.core.errors import RunFailed
from ampaudit.core.formats import low_precision_format
from ampaudit.core.untrusted import describe
from ampaudit.export.config import ConvertConfig
from ampaudit.export.onnx.decisions import breaks, comparable_outputs, orderings
from ampaudit.export.onnx.write import ONNX_FLOATS
from ampaudit.export.reference import compare_output, digest_of_tensors
from ampaudit.policy.load import load_policy
from ampaudit.policy.schema import AS_IS
from ampaudit.report.conversion import OutputRecord
from ampaudit.run.config import RunConfig
from ampaudit.run.device import pick_device
from ampaudit.run.executors import ExecutorCache
from ampaudit.run.lockstep import LockStep
from ampaudit.run.observer import Observer
from ampaudit.run.record import RunRecord
from ampaudit.source import Batch
from ampaudit.source.onnx.files import read_onnx, torch_dtype_of
from ampaudit.source.onnx.inputs import batch_of, by_name, inputs_of
from ampaudit.source.onnx.model import OnnxModel
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.isolation import call_unchanged
from ampaudit.trace.values import dtype_name

__all__ = [
    "Original",
    "WrittenFile",
    "describe_inaccurate",
    "refuse_broken",
    "worst_records",
]

_NEAR_ZERO = 2.0**-7  # spacing of bfloat16 at 1
Tensors = Mapping[str, torch.Tensor]


class Original:
    """A batch with the original's outputs."""

    def __init__(self, model: OnnxModel, batch: Batch, seed: int) -> None:
        self.batch = batch
        self._model = model
        self._seed = seed

    @cached_property
    def exact(self) -> Tensors:
        """The original's outputs by name."""
        return _tensors(call_unchanged(self._model, self.batch.args, self.batch.kwargs, seed=self._seed))


class WrittenFile:
    """Run one written file in lock-step, and compare its 16-bit outputs with the original's."""

    def __init__(self, path: Path, config: ConvertConfig) -> None:
        self._model = OnnxModel(read_onnx(path)).eval()
        self._seed = config.seed
        where, form = pick_device(config.device, audits=True), low_precision_format(config.dtype)
        settings = RunConfig(load_policy(AS_IS), load_policy("torch-cuda"), form, where, config.seed)
        self._executors = ExecutorCache(self._model, settings, RunRecord(where.type, "emulated"))

    def records(self, ours: Tensors, exact: Tensors) -> list[OutputRecord]:
        """Compare each output with the original's."""
        pairs = comparable_outputs(ours, exact, orderings(self._model.file.model))
        records = []
        for name, pair in pairs.items():
            dtype, digest = dtype_name(ours[name].dtype), digest_of_tensors([ours[name]])
            records.append(OutputRecord(name, dtype, digest, *compare_output(*pair)))
        return records

    def outputs(self, original: Original, number: int = 0) -> Tensors:
        """Return the outputs of the run in 16 bits by name."""
        batch, expected = _as_taken(original.batch, self._model), original.exact
        executor = self._executors.get(batch, number)
        alone = LockStep(
            executor.program, executor.placed, executor.backend, executor.device, converted_only=True
        )
        pairs = alone.run(tensor_leaves(batch.args, batch.kwargs), Observer())
        ours = {
            name.removeprefix("output."): low
            for name, (_, low) in zip(executor.program.traced.outputs, pairs, strict=True)
        }
        if len(ours) < len(expected):  # a tensor that is several outputs is listed once
            again = _tensors(call_unchanged(self._model, batch.args, batch.kwargs, seed=self._seed))
            listed = {id(again[name]): low for name, low in ours.items()}
            ours = {name: listed[id(tensor)] for name, tensor in again.items()}
        return ours


def _tensors(outputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors among outputs; elements of a sequence are named as in a trace."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in outputs.items():
        if isinstance(value, list):
            tensors |= {f"{name}[{number}]": each for number, each in enumerate(value)}
        elif value is not None:
            tensors[name] = value
    return tensors


def _as_taken(batch: Batch, model: OnnxModel) -> Batch:
    """Cast the floats of a batch to the input types of the written file, by position or name."""
    kinds = {str(value.name): value.dtype for value in model.inputs}
    inputs = by_name(batch, [*kinds])
    low = {
        n: torch_dtype_of(kind) for n, kind in kinds.items() if kind is not None and kind.name in ONNX_FLOATS
    }
    cast = {name: t.to(low[name]) if name in low else t for name, t in inputs.items()}
    return batch_of(inputs_of(model.inputs), cast)


def refuse_broken(
    records: Iterable[OutputRecord], ours: Tensors, exact: Tensors, config: ConvertConfig
) -> None:
    """Reject a file that computes inf or NaN, or another shape, where the original's outputs are finite.

    Raises:
        RunFailed: An output is broken.
    """
    for record in records:
        values, original = ours[record.name], exact[record.name]
        if breaks(values, original) or (record.max_error is None and values.shape != original.shape):
            hint = "scan the model with --advise, and pass a policy that keeps more in float32"
            if config.io != "float32" and original.to(getattr(torch, config.dtype)).isinf().any():
                hint = f"its values reach {float(original.abs().amax()):.4g}: --io float32"
            raise RunFailed(f"the written file computes {_fault(record)}", hint=hint)


def describe_inaccurate(
    records: Iterable[OutputRecord], min_sqnr: float, of_integers: float = -math.inf
) -> str:
    """Describe the outputs that are less accurate than that; empty if there are none."""
    return ", ".join(
        _fault(record)
        for record in records
        if _decibels(record) < (min_sqnr if record.is_float else max(min_sqnr, of_integers))
    )


def _fault(record: OutputRecord) -> str:
    name = describe(record.name)
    if record.max_error is None:
        return f"{name} as inf or NaN" if record.is_float else f"{name} in another shape"
    if record.differing is not None:
        return f"{name} with {100 * record.differing:.2g} % of its integers changed"
    if record.sqnr_db is None:
        return f"{name} as {record.max_error:.2g}, where the original is zero"
    return f"{name} with {record.sqnr_db:.0f} dB against FP32"


def _decibels(record: OutputRecord) -> float:
    """Return the accuracy of an output in dB: infinite if it is exact, -infinite if it is not finite."""
    if record.max_error is None or (record.sqnr_db is None and record.max_error > _NEAR_ZERO):
        return -math.inf  # the latter where the original is zero throughout
    return math.inf if record.sqnr_db is None else record.sqnr_db


def worst_records(batches: Iterable[Iterable[OutputRecord]]) -> tuple[OutputRecord, ...]:
    """Return the least accurate record of each output over all batches."""
    worst: dict[str, OutputRecord] = {}
    for record in (each for records in batches for each in records):
        current = worst.setdefault(record.name, record)
        if _badness(record) > _badness(current):
            worst[record.name] = record
    return tuple(worst.values())


def _badness(record: OutputRecord) -> tuple[float, float]:
    return -_decibels(record), record.max_error or 0.0
