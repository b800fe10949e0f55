"""Options of ``check``, and ``[tool.ampaudit]`` in pyproject.toml."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from pydantic import AllowInfNan

from ampaudit.audit.config import Ignored, TwinFile
from ampaudit.core.config import (
    Config,
    DeviceName,
    DtypeName,
    FilePath,
    Option,
    Seed,
    Texts,
    Trust,
)
from ampaudit.core.errors import UsageError, first_line
from ampaudit.core.pyproject import read_options
from ampaudit.core.source_config import AudioDirectory, BatchCount, ImageDirectory, TextFile
from ampaudit.core.untrusted import describe
from ampaudit.findings.finding import FailOnGaps

_FINITE = AllowInfNan(False)


class CheckConfig(Config):
    """Options of ``check``."""

    targets: Annotated[Texts, Option("Models, converted directories, and globs.", command_line=False)] = ()
    policy: Annotated[str | Path, Option("Policy name or rule file; converted directories use as-is.")] = (
        "ampaudit"
    )
    dtype: DtypeName = "float16"
    device: DeviceName = "auto"
    fail_on: Annotated[
        FailOnGaps, Option("Lowest severity that counts; 'gap' means errors and unaudited parts.")
    ] = "error"
    allow: Annotated[Texts, Option("Findings that do not count (repeatable).", metavar="CODE")] = ()
    ignore: Ignored = ()
    min_headroom: Annotated[
        float | None, _FINITE, Option("Minimum headroom of every 16-bit site.", metavar="BITS")
    ] = None
    min_sqnr: Annotated[float | None, _FINITE, Option("Minimum accuracy of every output.", metavar="DB")] = (
        None
    )
    max_metric_drop: Annotated[
        float | None, _FINITE, Option("Maximum drop of the model file's metric(output, batch).", metavar="X")
    ] = None
    max_fp32_share: Annotated[
        float | None, Ge(0), Le(1), _FINITE, Option("Maximum share of computing ops in float32.", metavar="P")
    ] = None
    baseline: Annotated[
        FilePath | None, Option("File of known findings; only what is new or worse counts.", metavar="FILE")
    ] = None
    update_baseline: Annotated[bool, Option("Write what counts to the file of --baseline.", file=False)] = (
        False
    )
    weights: Annotated[
        FilePath | None, Option("Checkpoint: safetensors, or .pt state_dict.", metavar="FILE")
    ] = None
    inputs: Annotated[
        FilePath | None,
        Option(
            "Python file with example_inputs(), batches() or metric(); or recorded calls.", metavar="PATH"
        ),
    ] = None
    text: TextFile = None
    images: ImageDirectory = None
    audio: AudioDirectory = None
    twins: TwinFile = None
    batches: BatchCount = None
    seed: Seed = 0
    train: Annotated[bool, Option("Audit the models in training mode.")] = False
    trust: Trust = False
    jobs: Annotated[int, Ge(1), Option("Number of targets to check in parallel.", flags=("-j",))] = 1
    timeout: Annotated[
        float | None, Gt(0), Option("Stop a target that takes longer than this.", metavar="SECONDS")
    ] = None
    max_memory: Annotated[
        str | None, Option("Stop a target that uses more memory, such as 4GB.", metavar="SIZE")
    ] = None


def read_config(path: Path) -> dict[str, Any]:
    """Read the options in a pyproject.toml by field name, expanding globs among the targets.

    Raises:
        UsageError: The file is not valid TOML, or has an invalid key or value.
    """
    options = read_options(CheckConfig, path, "tool.ampaudit", tables=("lint",))
    if "targets" in options:
        options["targets"] = [
            match for target in options["targets"] for match in _expand_target(path, target)
        ]
    return options


def _expand_target(path: Path, target: str) -> list[str]:
    """Resolve a target or glob relative to the file's directory; import paths stay as they are.

    Raises:
        UsageError: The glob is invalid or matches nothing.
    """
    if not set("*?[") & set(target):
        resolved = path.parent / target
        is_path = os.path.exists(resolved) or os.path.isfile(path.parent / target.rpartition(":")[0])
        return [str(resolved) if is_path else target]
    anchor = Path(target).anchor
    base, pattern = (Path(anchor), target[len(anchor) :]) if anchor else (path.parent, target)
    try:
        matches = sorted(map(str, base.glob(pattern)))
    except (OSError, ValueError) as error:  # for example, '**' beside other characters
        what = f"{path}: targets: {describe(target)!r}: {describe(first_line(error))}"
        raise UsageError(what, hint="correct the pattern") from error
    if not matches:
        raise UsageError(f"{path}: targets: nothing matches {describe(target)!r}", hint="correct the pattern")
    return matches
