"""Completes a converted directory: digests of every file, and the manifest."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from ampaudit.core.version import __version__
from ampaudit.export.config import ConvertConfig
from ampaudit.export.manifest import (
    FileRecord,
    Manifest,
    digest_of,
    files_under,
    write_manifest,
)
from ampaudit.export.stream import WeightFiles
from ampaudit.policy.schema import Constants
from ampaudit.report.conversion import OutputRecord

__all__ = ["CheckpointSource", "finish_directory"]

_PACKAGES = ("torch", "safetensors", "transformers", "onnx", "onnxscript")


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """What was converted, and how."""

    source: str
    sha256: str | None
    kind: Literal["model", "weights"]
    options: ConvertConfig
    seed: int
    clip: Constants | None


def finish_directory(
    stage: Path,
    origin: CheckpointSource,
    weights: WeightFiles,
    notes: Sequence[str],
    outputs: tuple[OutputRecord, ...],
    inputs: str | None,
) -> Manifest:
    """Write the manifest of a directory that is otherwise complete."""
    files = {name: FileRecord(*found) for name, found in weights.files.items()}
    for name in files_under(stage):
        if name not in files:
            files[name] = digest_of(stage / name)
    options = origin.options
    manifest = Manifest(
        schema=1,
        self_sha256="",
        tool={"name": "ampaudit", "version": __version__},
        kind=origin.kind,
        source=origin.source,
        source_sha256=origin.sha256,
        mode=options.mode,
        policy=options.rules.name,
        dtype=options.dtype,
        seed=origin.seed,
        versions=_versions(),
        masters=options.masters,
        clip=origin.clip,
        files=dict(sorted(files.items())),
        tensors=weights.tensors,
        inputs_sha256=inputs,
        outputs=outputs,
        notes=tuple(notes),
    )
    return write_manifest(stage, manifest)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
