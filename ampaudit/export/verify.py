"""Verifies that a converted directory is unchanged, and that its program computes the recorded outputs."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from ampaudit.checkpoint import FLOAT_TYPES, ONNX, PROGRAM, REFERENCE
from ampaudit.checkpoint.open import map_checkpoint
from ampaudit.checkpoint.safetensors import SafetensorsFile, clipped, dtype_of
from ampaudit.core.config import path_argument, with_options
from ampaudit.core.errors import AuditError, CouldNotAudit, first_line
from ampaudit.core.formats import ROUNDING_DB
from ampaudit.core.sandbox import Sandbox, SandboxLimits
from ampaudit.core.session import DEFAULT_SESSION, Progress, Session
from ampaudit.core.untrusted import describe_path, validate
from ampaudit.export.config import VerifyConfig
from ampaudit.export.manifest import FileRecord, Manifest, digest_of, files_under, read_manifest
from ampaudit.export.program import compare_output, digest_of_tensors, run_program
from ampaudit.export.weight_files import StoredTensor
from ampaudit.report.conversion import OutputRecord, Problem, Verification
from ampaudit.source import Batch
from ampaudit.source.exported import ExportedModel, StoredProgram, read_program
from ampaudit.source.inputs import with_tensors
from ampaudit.source.pt2.graph import ForeignOperator
from ampaudit.trace.values import tensors_in

_TIMEOUT = 3600.0
_ANSWER = TypeAdapter(tuple[list[Problem], list[str]])


@with_options(VerifyConfig)
def verify(
    directory: str | Path,
    *,
    config: VerifyConfig | None = None,
    session: Session = DEFAULT_SESSION,
    **options: Any,
) -> Verification:
    """Check hashes and rounding, then run the program in a sandbox and compare with its recorded outputs.

    Args:
        directory: Directory written by ``ampaudit convert``.
        config: Options as one record.
        session: Context of the call; only ``on_progress`` is used.
        **options: Fields of ``VerifyConfig``, which override those of ``config``.

    Returns:
        The report with all problems.

    Raises:
        WeightsError: The manifest is missing or invalid.
    """
    config, directory = VerifyConfig.merged(config, options), path_argument(directory, "directory")
    manifest = read_manifest(directory)
    damaged = list(check_files(directory, manifest, session.on_progress))
    problems = [*damaged, *check_rounding(directory, manifest, session.on_progress)]
    lines: list[str] = []
    recorded = PROGRAM in manifest.files and bool(manifest.outputs)
    if config.run and recorded and not (unfit := _unfit(manifest, damaged)):
        tolerance_db = config.tolerance_db
        # kernels with another order of summation agree to about 60 dB in float16 and 42 dB in bfloat16
        tolerance_db = ROUNDING_DB.get(manifest.dtype, 40.0) if tolerance_db is None else tolerance_db
        session.on_progress("running the program", 0, 0)
        more, lines = _in_sandbox(directory, tolerance_db)
        problems += more
    elif config.run and recorded:
        problems.append(Problem("program", PROGRAM, f"was not run: {unfit}"))
    elif config.run:
        lines = [f"nothing was run: {_not_recorded(manifest)}"]
    return Verification(
        directory=str(directory),
        files=len(manifest.files),
        bytes=sum(record.size for record in manifest.files.values()),
        tensors=len(manifest.tensors),
        masters=sum(t.master is not None for t in manifest.tensors.values()),
        problems=tuple(problems),
        outputs=tuple(lines),
        notes=manifest.notes,
    )


def _not_recorded(manifest: Manifest) -> str:
    if ONNX not in manifest.files or PROGRAM in manifest.files:
        return "the directory contains no program with recorded outputs"
    return f"compare the graph with its original by ampaudit scan {manifest.source} --against DIR/{ONNX}"


def _unfit(manifest: Manifest, damaged: Sequence[Problem]) -> str:
    """Return why a run would load other files than those that were written; empty if it would not."""
    needed = dict.fromkeys((PROGRAM, REFERENCE, *(t.file for t in manifest.tensors.values())))
    unlisted = next((name for name in needed if name not in manifest.files), None)
    if unlisted is not None:
        return f"{unlisted} is not in the manifest"
    problem = next((p for p in damaged if p.where in needed), None)
    return f"{problem.where} is {problem.kind}" if problem is not None else ""


def _in_sandbox(directory: Path, tolerance_db: float) -> tuple[list[Problem], list[str]]:
    request = {"directory": str(directory.resolve()), "tolerance_db": tolerance_db}
    limits = SandboxLimits(seconds=_TIMEOUT)  # a large model takes time and memory
    try:
        with Sandbox("ampaudit.export.verify:rerun_in_sandbox", request, limits) as sandbox:
            answer = sandbox.answer("could not be run", CouldNotAudit, "")
        return validate(_ANSWER, answer, directory / PROGRAM, CouldNotAudit, "")
    except CouldNotAudit as error:
        return [Problem("program", PROGRAM, str(error.args[0]))], []


def check_files(directory: Path, manifest: Manifest, on_progress: Progress) -> Iterator[Problem]:
    """Find missing, truncated, changed and extra files, and name the tensors that differ."""
    hashed, total = 0, sum(record.size for record in manifest.files.values())
    for name, record in manifest.files.items():
        on_progress("hashing MB of files", hashed // 10**6, total // 10**6)
        hashed += record.size
        problem = file_problem(directory, name, record)
        if problem is None:
            continue
        yield problem
        if name.endswith(".safetensors") and is_own_file(directory, name):
            yield from _changed_tensors(directory / name, name, manifest)
    for name in files_under(directory):
        if name not in manifest.files:
            yield Problem("extra", name, "is in the directory but not in the manifest")


def is_own_file(directory: Path, name: str) -> bool:
    """Return whether a path is a regular file that is reached without links."""
    path = directory / name
    try:
        links = any(part.is_symlink() for part in (path, *path.parents[: len(Path(name).parts) - 1]))
        return not links and path.is_file()
    except OSError:
        return False


def file_problem(directory: Path, name: str, record: FileRecord) -> Problem | None:
    """Return the problem of a file in the manifest, if any."""
    path = directory / name
    if not os.path.lexists(path):
        return Problem("missing", name, "is in the manifest but not in the directory")
    if not is_own_file(directory, name):
        return Problem("changed", name, "is a link, or not a regular file, and was not read")
    try:
        size = path.stat().st_size
        if size < record.size:
            return Problem("truncated", name, f"has {size:,} of {record.size:,} bytes")
        if size > record.size or digest_of(path).sha256 != record.sha256:
            return Problem("changed", name, "its SHA-256 is not the one in the manifest")
    except (AuditError, OSError) as error:
        return Problem("changed", name, f"cannot be read: {first_line(error)}")
    return None


def _changed_tensors(path: Path, name: str, manifest: Manifest) -> Iterator[Problem]:
    try:
        part = SafetensorsFile(path)
    except AuditError as error:
        yield Problem("changed", name, str(error.args[0]).removeprefix(f"{describe_path(path)}: "))
        return
    expected = _tensors_of(name, manifest)
    for tensor, (dtype, shape, crc32) in expected.items():
        where = f"{name}: {tensor}"
        entry = part.entries.get(tensor)
        if entry is None:
            yield Problem("tensor", where, "is missing")
        elif (entry.dtype, entry.shape) != (dtype, shape):
            yield Problem("tensor", where, f"is {entry.dtype} {list(entry.shape)}, was {dtype} {list(shape)}")
        elif _crc32(part, tensor) != crc32:
            yield Problem("tensor", where, "its values have changed")
    for tensor in part.entries:
        if expected and tensor not in expected:
            yield Problem("tensor", f"{name}: {tensor}", "is not in the manifest")


def _tensors_of(file: str, manifest: Manifest) -> dict[str, tuple[str, tuple[int, ...], int]]:
    tensors: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for name, stored in manifest.tensors.items():
        if stored.file == file:
            tensors[name] = (stored.dtype, stored.shape, stored.crc32)
        elif stored.master == file and stored.master_dtype is not None and stored.master_crc32 is not None:
            tensors[name] = (stored.master_dtype, stored.shape, stored.master_crc32)
    return tensors


def _crc32(part: SafetensorsFile, name: str) -> int:
    value = 0
    for piece in part.pieces(name):
        value = zlib.crc32(piece.view(torch.uint8).numpy().data, value)
    return value


def check_rounding(directory: Path, manifest: Manifest, on_progress: Progress) -> Iterator[Problem]:
    """Find working weights that differ from their rounded masters."""
    part = cache(lambda name: SafetensorsFile(directory / name))
    readable = cache(partial(is_own_file, directory))
    for number, (name, stored) in enumerate(manifest.tensors.items()):
        on_progress("comparing tensors with their masters", number, len(manifest.tensors))
        if stored.master is None or not all(map(readable, (stored.file, stored.master))):
            continue  # links and missing files are reported already
        try:
            wrong = _count_differences(part(stored.file), part(stored.master), name, stored, manifest)
        except (AuditError, KeyError):
            continue  # reported already: the file is damaged, or the tensor is missing
        if wrong:
            yield Problem(
                "rounding", f"{stored.file}: {name}", f"{wrong:,} values differ from their rounded master"
            )


def _count_differences(
    working: SafetensorsFile, master: SafetensorsFile, name: str, stored: StoredTensor, manifest: Manifest
) -> int:
    dtype, wrong = dtype_of(stored.dtype), 0
    ours, theirs = working.entries[name], master.entries[name]
    if (ours.dtype, theirs.dtype) != (stored.dtype, stored.master_dtype):
        return 0  # reported by the check of the files
    if dtype is None or dtype.itemsize != 2 or theirs.dtype not in FLOAT_TYPES or ours.shape != theirs.shape:
        return ours.elements
    for values, original in zip(working.pieces(name), master.pieces(name), strict=True):
        exact = original
        if manifest.clip is not None:
            exact = clipped(original, manifest.clip.min_positive, manifest.clip.max_finite)
        wrong += int((exact.to(dtype).view(torch.int16) != values.view(torch.int16)).sum())
    return wrong


def rerun(directory: Path, tolerance_db: float) -> tuple[list[Problem], list[str]]:
    """Run the program on the recorded inputs; return the problems, and a line for each healthy output.

    Outputs of other kernels count as equal at a signal-to-noise ratio of ``tolerance_db``.
    """
    manifest = read_manifest(directory)
    try:
        program = read_program(directory / PROGRAM)
        recorded = map_checkpoint(directory / REFERENCE).tensors
    except AuditError as error:
        if isinstance(error.__cause__, ForeignOperator):  # which the original model uses as well
            return [], [f"nothing was run: {error.__cause__}"]
        return [Problem("program", PROGRAM, str(error.args[0]))], []
    problems = _other_weights(program, directory, manifest) if manifest.mode == "inference" else []
    example = Batch(*(program.example or ()))
    names = [f"input[{number}]" for number in range(len(tensors_in((example.args, example.kwargs))))]
    if any(name not in recorded for name in names):
        problem = Problem("program", REFERENCE, "its inputs are not those that the program takes")
        return [*problems, problem], []
    batch = with_tensors(example, [recorded[name] for name in names])
    results = run_program(ExportedModel(program), (batch.args, batch.kwargs), manifest.seed)
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
    """Return a line on an output that agrees with the recorded one, or the problem of one that does not."""
    if digest_of_tensors([ours]) == record.sha256:
        return f"{record.name}: the same bits"
    if before is None or before.shape != ours.shape or before.dtype != ours.dtype:
        return Problem("output", record.name, "has another shape or dtype than the recorded one")
    error, accuracy = compare_output(ours, before)
    text = f"differs from the recorded one by up to {error:.3g}" if error is not None else "is not finite"
    if accuracy is not None and accuracy >= tolerance_db:
        return f"{record.name}: {text} ({accuracy:.0f} dB): the kernels of another machine or version"
    return Problem("output", record.name, f"{text}{f', {accuracy:.0f} dB' if accuracy is not None else ''}")


def _other_weights(program: StoredProgram, directory: Path, manifest: Manifest) -> list[Problem]:
    """Find parameters of the program that differ from the checkpoint's."""
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
