"""Reads and writes ``manifest.json``: digests of every file, their origin, and the program's outputs."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PureWindowsPath
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from ampaudit.checkpoint import BESIDE_WEIGHTS, MANIFEST
from ampaudit.core import __version__
from ampaudit.core.errors import WeightsError, first_line
from ampaudit.core.untrusted import (
    MAX_TABLE,
    describe,
    describe_path,
    open_regular,
    parse_json,
    read_bounded,
    validate,
)
from ampaudit.export.config import ConvertConfig
from ampaudit.export.weight_files import StoredTensor, WeightFiles
from ampaudit.policy.schema import Constants
from ampaudit.report.conversion import Conversion, OutputRecord, ProgramShapes

_HINT = "convert the model again"
_MAX_FILES = 100_000
_MAX_NAME = 1000  # bytes
_PACKAGES = ("torch", "safetensors", "transformers", "onnx", "onnxscript")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """SHA-256 (hexadecimal) and size in bytes of a file."""

    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of a converted directory."""

    schema: Literal[1]
    self_sha256: str  # of this file with this field empty, which detects corruption
    tool: dict[str, str]  # name and version
    kind: Literal["model", "weights"]  # traced and run; or a checkpoint alone
    source: str  # location of the original
    source_sha256: str | None  # of the file or configuration that the model was built from
    mode: Literal["inference", "train"]  # casts folded into the weights, or in the graph over FP32 masters
    policy: str
    dtype: str  # the 16-bit format
    seed: int
    versions: dict[str, str]  # of Python, torch and others that can change a result
    masters: bool  # whether masters of rounded weights are stored
    clip: Constants | None  # limits to which the policy clips weights before rounding
    files: Annotated[dict[str, FileRecord], Field(max_length=_MAX_FILES)]  # all others, by path
    tensors: dict[str, StoredTensor]
    inputs_sha256: str | None  # of the recorded inputs; null without a run
    outputs: tuple[OutputRecord, ...]  # that the program computed from them
    notes: tuple[str, ...]
    shapes: ProgramShapes | None = None  # absent without a program, and in older directories

    @property
    def weight_files(self) -> set[str]:
        """Names of the files with working weights, or with masters."""
        files = {t.file for t in self.tensors.values()}
        return files | {t.master for t in self.tensors.values() if t.master is not None}


_ADAPTER = TypeAdapter(Manifest)


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a directory.

    Raises:
        WeightsError: The manifest is missing, corrupt or changed, or a path in it leads elsewhere.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise WeightsError(
            f"{describe_path(directory)} has no readable {MANIFEST}",
            hint="give a directory that 'ampaudit convert' wrote",
        )
    text = read_bounded(path, MAX_TABLE, WeightsError)
    try:
        table = parse_json(text)
    except ValueError as error:
        raise _corrupt(path, first_line(error)) from error
    manifest = validate(_ADAPTER, table, path, WeightsError, _HINT)
    if (
        _own_digest(manifest) != manifest.self_sha256
        or text.replace(b"\r\n", b"\n") != _text(manifest).encode()
    ):
        raise _corrupt(path, "it was changed after it was written: its own digest differs")
    weights = manifest.weight_files
    ours = {name.casefold(): name for name in (MANIFEST, *BESIDE_WEIGHTS, *weights)}
    for name in (*manifest.files, *weights):
        if not _is_within(name) or name == MANIFEST:
            raise _corrupt(path, f"it names the file {describe(name)!r}, which is not in the directory")
        if ours.get(name.casefold(), name) != name:
            raise _corrupt(
                path, f"it names the file {describe(name)!r}, which differs from another only in case"
            )
    return manifest


def _is_within(name: str) -> bool:
    """Return whether a relative path stays within the directory, on every system."""
    path = PureWindowsPath(name)
    plain = name.isprintable() and len(name.encode()) <= _MAX_NAME and "\\" not in name
    return plain and not path.anchor and ".." not in path.parts and name == path.as_posix() != "."


def manifest_of(
    options: ConvertConfig,
    weights: WeightFiles,
    *,
    kind: Literal["model", "weights"],
    source: str,
    source_sha256: str | None,
    seed: int,
    clip: Constants | None,
    notes: Sequence[str],
    inputs_sha256: str | None = None,
    outputs: tuple[OutputRecord, ...] = (),
    shapes: ProgramShapes | None = None,
) -> Manifest:
    """Build the manifest of a conversion; ``write_manifest`` adds the files other than weights."""
    return Manifest(
        schema=1,
        self_sha256="",
        tool={"name": "ampaudit", "version": __version__},
        kind=kind,
        source=source,
        source_sha256=source_sha256,
        mode=options.mode,
        policy=options.rules.name,
        dtype=options.dtype,
        seed=seed,
        versions=_versions(),
        masters=options.masters,
        clip=clip,
        files={name: FileRecord(*record) for name, record in weights.files.items()},
        tensors=weights.tensors,
        inputs_sha256=inputs_sha256,
        outputs=outputs,
        notes=tuple(notes),
        shapes=shapes,
    )


def write_manifest(directory: Path, manifest: Manifest) -> Manifest:
    """Write the manifest of an otherwise complete directory.

    Returns:
        The manifest with its own digest, and with records of all files.
    """
    unlisted = [name for name in files_under(directory) if name not in manifest.files]
    files = {**manifest.files, **{name: digest_of(directory / name) for name in unlisted}}
    complete = replace(manifest, files=dict(sorted(files.items())))
    complete = replace(complete, self_sha256=_own_digest(complete))
    (directory / MANIFEST).write_text(_text(complete), encoding="utf-8")
    return complete


def conversion_of(manifest: Manifest, output: Path) -> Conversion:
    """Summarize a conversion to ``output`` from its manifest; fields that the manifest lacks are empty."""
    return Conversion(
        source=manifest.source,
        output=str(output),
        policy=manifest.policy,
        dtype=manifest.dtype,
        mode=manifest.mode,
        verdict=None,
        exit_code=0,
        bytes_before=0,
        bytes_after=0,
        stored={},
        kept={},
        overflow={},
        broken={},
        masters=manifest.masters,
        outputs=manifest.outputs,
        onnx_casts=None,
        onnx_error=None,
        files={name: record.size for name, record in manifest.files.items()},
        notes=manifest.notes,
        shapes=manifest.shapes,
    )


def write_table(path: Path, table: Mapping[str, Any]) -> None:
    """Write a configuration or an index as JSON."""
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def files_under(directory: Path) -> list[str]:
    """List all files in a directory except the manifest, including links, FIFOs and devices."""
    names: list[str] = []
    for root, folders, files in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        names += [(Path(root) / name).relative_to(directory).as_posix() for name in (*files, *links)]
    return sorted(name for name in names if name != MANIFEST)


def digest_of(path: Path) -> FileRecord:
    """Compute the SHA-256 of a file, read in pieces, and its size.

    Raises:
        WeightsError: See ``open_regular``.
    """
    with os.fdopen(open_regular(path, WeightsError), "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileRecord(digest, os.fstat(stream.fileno()).st_size)


def _own_digest(manifest: Manifest) -> str:
    return hashlib.sha256(_text(replace(manifest, self_sha256="")).encode()).hexdigest()


def _text(manifest: Manifest) -> str:
    table = _ADAPTER.dump_python(manifest, mode="json")
    if manifest.shapes is None:
        del table["shapes"]
    return json.dumps(table, indent=1, ensure_ascii=False) + "\n"


def _corrupt(path: Path, what: str) -> WeightsError:
    return WeightsError(f"{describe_path(path)}: {what}", hint=_HINT)
