"""Records the outputs of a converted program and their distance from FP32."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from ampaudit.core.decibels import share_db, signal_to_noise_db
from ampaudit.core.errors import first_line
from ampaudit.report.conversion import OutputRecord
from ampaudit.trace.entry import flatten_outputs, tensor_leaves
from ampaudit.trace.isolation import call_unchanged
from ampaudit.trace.values import dtype_name

__all__ = [
    "ReferenceOutputs",
    "compare_output",
    "digest_of_tensors",
    "flat_outputs",
    "record_reference",
    "run_program",
]


Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ReferenceOutputs:
    """Recorded tensors by name (``input[i]``, ``output[i]``, ``fp32[i]``), with a summary of each output.

    ``note`` says why there is no output, if there is none.
    """

    tensors: dict[str, torch.Tensor]
    outputs: tuple[OutputRecord, ...]
    note: str


def record_reference(
    program: ExportedProgram,
    model: nn.Module,
    model_call: Call,
    call: Call,
    names: Sequence[str],
    seed: int,
) -> ReferenceOutputs:
    """Run the program in its own dtypes, and the model in FP32, on one batch.

    Args:
        program: Converted program.
        model: FP32 model.
        model_call: Positional and keyword inputs of the model.
        call: Inputs of the program, without the arguments that are fixed in it.
        names: Names of the outputs.
        seed: Seed that is set before each run.
    """
    inputs = [t.detach().cpu().contiguous() for t in tensor_leaves(*call)]
    tensors = {f"input[{i}]": t.clone() for i, t in enumerate(inputs)}
    every = dict(
        flatten_outputs(call_unchanged(model, *model_call, seed=seed))
    )  # with caches, which the program has not
    exact = [every[name] for name in names]
    tensors |= {f"fp32[{i}]": t.clone().contiguous() for i, t in enumerate(exact)}
    results = run_program(program.module(), call, seed)
    if isinstance(results, str):
        return ReferenceOutputs(tensors, (), results)
    tensors |= {f"output[{i}]": t.clone().contiguous() for i, t in enumerate(results)}
    outputs = tuple(
        OutputRecord(
            name,
            dtype_name(ours.dtype),
            digest_of_tensors([ours]),
            *compare_output(ours, ref),
        )
        for name, ours, ref in zip(names, results, exact, strict=True)
    )
    return ReferenceOutputs(tensors, outputs, "")


def run_program(program: nn.Module, call: Call, seed: int) -> list[torch.Tensor] | str:
    """Return a program's outputs on the CPU as a flat list, or the reason why it failed."""
    try:
        return flat_outputs(call_unchanged(program, *call, seed=seed))
    except (RuntimeError, NotImplementedError) as error:
        return f"this machine's CPU cannot run the program in its dtypes: {first_line(error)}"


def flat_outputs(output: Any) -> list[torch.Tensor]:
    """Return the tensors of an output in order, detached and on the CPU."""
    return [tensor.detach().cpu() for tensor in tensor_leaves((output,), {})]


def compare_output(ours: torch.Tensor, reference: torch.Tensor) -> tuple[float | None, float | None]:
    """Return the largest absolute error and the SQNR in dB; ``None`` if not finite, or exact.

    The SQNR of integers is their ``share_db``, as in a scan. Tensors of different shapes have
    neither.
    """
    ours, reference = ours.detach(), reference.detach()
    if ours.shape != reference.shape:
        return None, None
    if not ours.numel():
        return 0.0, None
    if not ours.is_floating_point():
        largest = float((ours.double() - reference.double()).abs().amax())
        db = share_db(float((ours != reference).double().mean()))
        return largest, None if db is None else round(db, 2)
    wide = torch.float64 if torch.float64 in (ours.dtype, reference.dtype) else torch.float32
    error = ours.to(wide) - reference.to(wide)
    if not error.isfinite().all():  # where both are infinite, or NaN, they agree
        same = (ours == reference) | (ours.isnan() & reference.isnan())
        error, reference = error.masked_fill(same, 0.0), reference[reference.isfinite()]
    largest = float(torch.linalg.vector_norm(error, math.inf))
    if not math.isfinite(largest):
        return None, None
    noise, signal = (
        float(torch.linalg.vector_norm(t.to(wide), dtype=torch.float64)) for t in (error, reference)
    )
    db = signal_to_noise_db(signal**2, noise**2)
    return largest, None if db is None else round(db, 2)


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def digest_of_tensors(tensors: Sequence[torch.Tensor]) -> str:
    """Return the SHA-256 of the tensors' dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        whole = tensor.detach().cpu().contiguous()
        flat = whole.as_strided((whole.numel(),), (1,))  # the one element of a tensor may have any stride
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
