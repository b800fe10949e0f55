"""Runs a written ONNX file in lock-step, and compares its outputs with the original's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ampaudit.core.errors import RunFailed
from ampaudit.core.formats import low_precision_format
from ampaudit.export.config import ConvertConfig
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
from ampaudit.source import Batch, ModelSource
from ampaudit.source.onnx.files import read_onnx, torch_dtype_of
from ampaudit.source.onnx.inputs import by_name
from ampaudit.source.onnx.model import OnnxModel
from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.isolation import call_unchanged
from ampaudit.trace.values import dtype_name

__all__ = ["least_accuracy", "outputs_of"]


def outputs_of(source: ModelSource, path: Path, config: ConvertConfig) -> tuple[OutputRecord, ...]:
    """Run the written file in lock-step, and compare its 16-bit outputs with the original's.

    Raises:
        RunFailed: they are not finite where the original's are, or less accurate than was asked for.
    """
    written = OnnxModel(read_onnx(path)).eval()
    where, form = pick_device(config.device, audits=True), low_precision_format(config.dtype)
    settings = RunConfig(load_policy(AS_IS), load_policy("torch-cuda"), form, where, config.seed)
    executors = ExecutorCache(written, settings, RunRecord(where.type, "emulated"))
    records: dict[str, OutputRecord] = {}
    for number, batch in enumerate(source.batches):
        expected = _tensors(call_unchanged(source.model, batch.args, batch.kwargs, seed=config.seed))
        taken = _as_taken(batch, written)
        executor = executors.get(taken, number)
        alone = LockStep(
            executor.program, executor.placed, executor.backend, executor.device, converted_only=True
        )
        pairs = alone.run(tensor_leaves(taken.args, taken.kwargs), Observer())
        found = {
            name.removeprefix("output."): ours
            for name, (_, ours) in zip(executor.program.traced.outputs, pairs, strict=True)
        }
        if len(found) < len(expected):  # a tensor that is several outputs is listed once
            again = _tensors(call_unchanged(written, taken.args, taken.kwargs, seed=config.seed))
            listed = {id(again[name]): ours for name, ours in found.items()}
            found = {name: listed[id(tensor)] for name, tensor in again.items()}
        for name, exact in expected.items():
            ours = found[name]
            record = _record(name, ours, exact)
            if name not in records or _worse(record, records[name]):
                records[name] = record
            if record.max_error is None and ours.is_floating_point() and exact.isfinite().all():
                hint = "scan the model with --advise, and pass a policy that keeps more in float32"
                if config.io != "float32" and exact.to(getattr(torch, config.dtype)).isinf().any():
                    hint = f"its values reach {float(exact.abs().amax()):.4g}: --io float32"
                raise RunFailed(f"the written file computes {name} as inf or NaN", hint=hint)
    return tuple(records.values())


def _tensors(outputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors among outputs, those of a sequence under the names that a trace gives them."""
    found: dict[str, torch.Tensor] = {}
    for name, value in outputs.items():
        if isinstance(value, list):
            found |= {f"{name}[{number}]": each for number, each in enumerate(value)}
        elif value is not None:
            found[name] = value
    return found


def _as_taken(batch: Batch, model: OnnxModel) -> Batch:
    """Cast the floats of a batch to what the written file takes, by position or name."""
    kinds = {str(value.name): value.dtype for value in model.inputs}
    given = by_name(batch, [*kinds])
    low = {
        n: torch_dtype_of(kind) for n, kind in kinds.items() if kind is not None and kind.name in ONNX_FLOATS
    }
    return Batch((), {name: t.to(low[name]) if name in low else t for name, t in given.items()})


def _record(name: str, ours: torch.Tensor, exact: torch.Tensor) -> OutputRecord:
    digest = digest_of_tensors([ours])
    return OutputRecord(name, dtype_name(ours.dtype), digest, *compare_output(ours, exact))


def _worse(one: OutputRecord, other: OutputRecord) -> bool:
    if one.max_error is None or other.max_error is None:
        return one.max_error is None
    return one.max_error > other.max_error


def least_accuracy(outputs: Iterable[OutputRecord]) -> float:
    """Return the accuracy of the worst output in dB; NaN and inf are worse than all."""
    floats = [record for record in outputs if "float" in record.dtype]
    worst = (-math.inf if record.max_error is None else record.sqnr_db for record in floats)
    return min((found for found in worst if found is not None), default=math.inf)
