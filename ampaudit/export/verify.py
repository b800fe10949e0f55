"""Verifies that a converted directory is unchanged and still computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from pydantic import TypeAdapter

from ampaudit.checkpoint.layout import ONNX, PROGRAM, REFERENCE
from ampaudit.core.arguments import given_path
from ampaudit.core.config import with_options
from ampaudit.core.errors import CouldNotAudit
from ampaudit.core.formats import ROUNDING_DB
from ampaudit.core.sandbox import Sandbox, SandboxLimits
from ampaudit.core.untrusted import validate
from ampaudit.export.config import VerifyConfig, VerifyOptions
from ampaudit.export.integrity import check_files, check_rounding
from ampaudit.export.manifest import Manifest, read_manifest
from ampaudit.report.verification import Problem, Verification

__all__ = ["verify"]

_TIMEOUT = 3600.0
_ANSWER = TypeAdapter(tuple[list[Problem], list[str]])


@with_options(VerifyConfig, VerifyOptions)
def verify(
    directory: str | Path, *, config: VerifyConfig | None = None, **options: Unpack[VerifyOptions]
) -> Verification:
    """Check hashes and rounding, then run the program in a sandbox and compare its outputs.

    Args:
        directory: a directory written by ``ampaudit convert``.
        config: the options as one record.
        **options: fields of ``VerifyConfig``, which override those of ``config``.

    Returns:
        The checks made, and every problem.

    Raises:
        WeightsError: the manifest is missing or invalid.
    """
    chosen, directory = VerifyConfig.given(config, options), given_path(directory, "directory")
    manifest = read_manifest(directory)
    damaged = list(check_files(directory, manifest, chosen.on_progress))
    problems = [*damaged, *check_rounding(directory, manifest, chosen.on_progress)]
    lines: list[str] = []
    recorded = PROGRAM in manifest.files and bool(manifest.outputs)
    if chosen.run and recorded and not (unfit := _unfit(manifest, damaged)):
        asked = chosen.tolerance_db
        # kernels that add up in another order agree to about 60 dB in float16 and 42 dB in bfloat16
        asked = ROUNDING_DB.get(manifest.dtype, 40.0) if asked is None else asked
        chosen.on_progress("running the program", 0, 0)
        more, lines = _in_sandbox(directory, asked)
        problems += more
    elif chosen.run and recorded:
        problems.append(Problem("program", PROGRAM, f"was not run: {unfit}"))
    elif chosen.run:
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
    """Return why a file that a run would load cannot be trusted to be the one that was written."""
    needed = dict.fromkeys((PROGRAM, REFERENCE, *(t.file for t in manifest.tensors.values())))
    unlisted = next((name for name in needed if name not in manifest.files), None)
    if unlisted is not None:
        return f"{unlisted} is not in the manifest"
    problem = next((p for p in damaged if p.where in needed), None)
    return f"{problem.where} is {problem.kind}" if problem is not None else ""


def _in_sandbox(directory: Path, tolerance_db: float) -> tuple[list[Problem], list[str]]:
    request = {"directory": str(directory.resolve()), "tolerance_db": tolerance_db}
    limits = SandboxLimits(seconds=_TIMEOUT)  # a large model takes its time and memory
    try:
        with Sandbox("ampaudit.export.rerun:rerun_in_sandbox", request, limits) as sandbox:
            found = sandbox.answer("could not be run", CouldNotAudit, "")
        return validate(_ANSWER, found, directory / PROGRAM, CouldNotAudit, "")
    except CouldNotAudit as error:
        return [Problem("program", PROGRAM, str(error.args[0]))], []
