"""Runs a converted program on its recorded inputs and compares its outputs with the recorded ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ampaudit.checkpoint.layout import PROGRAM, REFERENCE
from ampaudit.checkpoint.mapped import map_checkpoint
from ampaudit.core.errors import AuditError, first_line
from ampaudit.export.manifest import Manifest, read_manifest
from ampaudit.export.program import compare_output, digest_of_tensors, run_program
from ampaudit.report.conversion import OutputRecord, Problem
from ampaudit.source.exported import ExportedModel, StoredProgram, read_program

__all__ = ["rerun", "rerun_in_sandbox"]


def rerun(directory: Path, tolerance_db: float) -> tuple[list[Problem], list[str]]:
    """Run the program on the recorded inputs; return the problems, and a line for each healthy output.

    Args:
        directory: Converted directory with a program.
        tolerance_db: Signal-to-noise ratio in dB at which outputs of other kernels count as equal.
    """
    manifest = read_manifest(directory)
    try:
        program = read_program(directory / PROGRAM)
        recorded = map_checkpoint(directory / REFERENCE).tensors
    except AuditError as error:
        return [Problem("program", PROGRAM, str(error.args[0]))], []
    problems = _other_weights(program, directory, manifest) if manifest.mode == "inference" else []
    call = _with_inputs(program, recorded)
    if call is None:
        problem = Problem("program", REFERENCE, "its inputs are not those that the program takes")
        return [*problems, problem], []
    results = run_program(ExportedModel(program), call, manifest.seed)
    if isinstance(results, str):
        return [*problems, Problem("program", PROGRAM, results)], []
    compared = [
        _compare_recorded(record, ours, recorded.get(f"output[{index}]"), tolerance_db)
        for index, (record, ours) in enumerate(zip(manifest.outputs, results, strict=False))
    ]
    problems += [result for result in compared if isinstance(result, Problem)]
    return problems, [result for result in compared if isinstance(result, str)]


def _compare_recorded(
    record: OutputRecord, ours: torch.Tensor, before: torch.Tensor | None, tolerance_db: float
) -> str | Problem:
    """Return a line about an output that agrees with the recorded one, or the problem."""
    if digest_of_tensors([ours]) == record.sha256:
        return f"{record.name}: the same bits"
    if before is None or before.shape != ours.shape or before.dtype != ours.dtype:
        return Problem("output", record.name, "has another shape or dtype than the recorded one")
    error, accuracy = compare_output(ours, before)
    text = f"differs from the recorded one by up to {error:.3g}" if error is not None else "is not finite"
    if accuracy is not None and accuracy >= tolerance_db:
        return f"{record.name}: {text} ({accuracy:.0f} dB): the kernels of another machine or version"
    return Problem("output", record.name, f"{text}{f', {accuracy:.0f} dB' if accuracy is not None else ''}")


def _with_inputs(program: StoredProgram, recorded: dict[str, torch.Tensor]) -> Any:
    """Return the program's example call with the recorded tensors."""
    leaves, spec = pytree.tree_flatten(program.example or ((), {}))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    names = [f"input[{number}]" for number in range(len(places))]
    if any(name not in recorded for name in names):
        return None
    for place, name in zip(places, names, strict=True):
        leaves[place] = recorded[name]
    return pytree.tree_unflatten(leaves, spec)


def _other_weights(program: StoredProgram, directory: Path, manifest: Manifest) -> list[Problem]:
    """Find parameters of the program that differ from the checkpoint's in any bit."""
    problems: list[Problem] = []
    tensors: dict[str, torch.Tensor] = {}
    for file in dict.fromkeys(t.file for t in manifest.tensors.values()):
        try:
            tensors.update(map_checkpoint(directory / file).tensors)
        except AuditError:
            continue  # reported by the check of the files
    for name, stored in manifest.tensors.items():
        ours = program.weights.get(stored.parameter or name)
        theirs = tensors.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            continue
        if digest_of_tensors([ours]) != digest_of_tensors([theirs]):
            problems.append(
                Problem("program", f"{PROGRAM}: {stored.parameter or name}", f"is not that of {stored.file}")
            )
    return problems


def rerun_in_sandbox(request: dict[str, Any]) -> Callable[[], Any]:
    """Return the function that a sandbox calls; see ``ampaudit.core.sandbox``."""

    def work() -> Any:
        try:
            problems, lines = rerun(Path(request["directory"]), request["tolerance_db"])
        except Exception as error:
            problem = Problem("program", PROGRAM, f"{type(error).__name__}: {first_line(error)}")
            problems, lines = [problem], []
        return [[asdict(problem) for problem in problems], lines]

    return work
