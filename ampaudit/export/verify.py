"""Verifies that a converted directory is unchanged and still computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from pydantic import TypeAdapter

from ampaudit.checkpoint.layout import PROGRAM
from ampaudit.core.errors import CouldNotAudit
from ampaudit.core.sandbox import Sandbox, SandboxLimits
from ampaudit.core.untrusted import validate
from ampaudit.export.config import VerifyConfig, VerifyOptions
from ampaudit.export.integrity import check_files, check_rounding
from ampaudit.export.manifest import read_manifest
from ampaudit.report.problem import Problem
from ampaudit.report.verification import Verification

__all__ = ["verify"]

# kernels that add up in another order agree to about 60 dB in float16 and 42 dB in bfloat16
_TOLERANCE_DB = {"float16": 40.0, "bfloat16": 25.0}
_TIMEOUT = 3600.0
_ANSWER = TypeAdapter(tuple[list[Problem], list[str]])


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
    chosen, directory = VerifyConfig.given(config, options), Path(directory)
    manifest = read_manifest(directory)
    problems = [*check_files(directory, manifest), *check_rounding(directory, manifest)]
    lines: list[str] = []
    if chosen.run and PROGRAM in manifest.files and (directory / PROGRAM).is_file() and manifest.outputs:
        asked = chosen.tolerance_db
        asked = _TOLERANCE_DB.get(manifest.dtype, 40.0) if asked is None else asked
        more, lines = _in_sandbox(directory, asked)
        problems += more
    elif chosen.run:
        lines = ["nothing was run: the directory contains no program with recorded outputs"]
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


def _in_sandbox(directory: Path, tolerance_db: float) -> tuple[list[Problem], list[str]]:
    request = {"directory": str(directory.resolve()), "tolerance_db": tolerance_db}
    limits = SandboxLimits(seconds=_TIMEOUT)  # a large model takes its time and memory
    try:
        with Sandbox("ampaudit.export.rerun:rerun_in_sandbox", request, limits) as sandbox:
            found = sandbox.answer("could not be run", CouldNotAudit, "")
        return validate(_ANSWER, found, directory / PROGRAM, CouldNotAudit, "")
    except CouldNotAudit as error:
        return [Problem("program", PROGRAM, str(error.args[0]))], []
