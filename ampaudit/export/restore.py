"""Restores the original checkpoint from the masters of a converted directory."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from ampaudit.checkpoint import BESIDE_WEIGHTS, FLOAT_TYPES, MANIFEST, TORCH_NAMES
from ampaudit.checkpoint.open import INDEX_SUFFIX, ChangedPart, count_megabytes
from ampaudit.checkpoint.safetensors import SafetensorsFile, TensorEntry, write_safetensors
from ampaudit.core.errors import UsageError, WeightsError
from ampaudit.core.files import staged_directory
from ampaudit.core.session import Progress, silent
from ampaudit.core.source_config import CONFIG_FILE
from ampaudit.core.untrusted import describe, describe_path, read_table
from ampaudit.export.manifest import FileRecord, Manifest, read_manifest, write_manifest, write_table
from ampaudit.export.verify import file_problem, is_own_file
from ampaudit.export.weight_files import MASTER_INDEX, StoredTensor
from ampaudit.source.model_config import read_raw_config, with_stored_dtype


def restore(directory: Path, output: Path, *, force: bool, on_progress: Progress = silent) -> Manifest:
    """Restore every tensor bit for bit to its state before rounding, and verify it.

    Names, shards, metadata and all other files are those of the converted directory.

    Raises:
        UsageError: The directory has no masters.
        WeightsError: The directory is damaged: a tensor does not match the manifest.
        OutputError: The output cannot be written; nothing is left behind.
    """
    manifest = read_manifest(directory)
    missing = [
        name for name, t in manifest.tensors.items() if t.master_dtype is not None and t.master is None
    ]
    if missing:
        raise UsageError(
            f"{describe_path(directory)} has no masters: {describe(missing[0])!r} and "
            f"{len(missing) - 1} more cannot be restored",
            hint="convert again without --no-masters",
        )
    with staged_directory(output, force=force, marker=MANIFEST) as stage:
        total = sum(TensorEntry(n, t.original_dtype, t.shape).size for n, t in manifest.tensors.items())
        counted = count_megabytes("restoring MB of weights", total, on_progress)
        parts = {name: ChangedPart(_part(directory, name), counted) for name in manifest.weight_files}
        files: dict[str, FileRecord] = {}
        tensors: dict[str, StoredTensor] = {}
        for label in dict.fromkeys(t.file for t in manifest.tensors.values()):
            record, restored = _restore_file(label, manifest, parts, stage / label)
            files[label] = record
            tensors |= restored
        _copy_rest(directory, stage, manifest)
        restored_manifest = replace(
            manifest, kind="weights", mode="inference", policy="none", dtype="float32", clip=None,
            files=files, tensors=tensors, inputs_sha256=None, outputs=(),
            source=str(directory), notes=("restored from the masters of a converted directory",),
        )  # fmt: skip
        return write_manifest(stage, restored_manifest)


def _restore_file(
    label: str, manifest: Manifest, parts: dict[str, ChangedPart], path: Path
) -> tuple[FileRecord, dict[str, StoredTensor]]:
    """Restore one file, with its tensors in the order of the converted one."""
    working = parts[label]
    stored = {name: manifest.tensors[name] for name in working.entries if name in manifest.tensors}
    entries = [TensorEntry(name, t.original_dtype, t.shape) for name, t in stored.items()]
    sources = {name: parts[label if t.master is None else t.master] for name, t in stored.items()}
    for entry in entries:
        source = sources[entry.name].entries.get(entry.name)
        if source is None or (source.dtype, source.shape) != (entry.dtype, entry.shape):
            what = f"tensor {describe(entry.name)!r} is not that of the manifest"
            raise _damaged(sources[entry.name].label, what)
    pieces = ((name, part.pieces(name)) for name, part in sources.items())
    result = write_safetensors(path, entries, working.metadata, pieces)
    for name, t in stored.items():
        expected = t.crc32 if t.master is None else t.master_crc32
        if result.crc32[name] != expected:
            raise _damaged(t.master or label, f"tensor {describe(name)!r} was changed after the conversion")
    tensors = {
        name: StoredTensor(label, t.original_dtype, t.shape, result.crc32[name], "as it was", t.parameter)
        for name, t in stored.items()
    }
    return FileRecord(result.sha256, result.size), tensors


def _part(directory: Path, name: str) -> SafetensorsFile:
    if not is_own_file(directory, name):
        raise _damaged(name, "is missing, a link, or not a regular file")
    return SafetensorsFile(directory / name)


def _copy_rest(directory: Path, stage: Path, manifest: Manifest) -> None:
    """Copy files other than weights and ampaudit's; restore the dtype in config.json and sizes in indexes."""
    weights = manifest.weight_files
    before = [TensorEntry(name, t.original_dtype, t.shape) for name, t in manifest.tensors.items()]
    for name, record in manifest.files.items():
        if name in weights or name in BESIDE_WEIGHTS or name == MASTER_INDEX:
            continue
        problem = file_problem(directory, name, record)
        if problem is not None:
            raise _damaged(name, problem.what)
        place = stage / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(directory / name, place)
        if name == CONFIG_FILE:
            floats = {TORCH_NAMES[entry.dtype] for entry in before if entry.dtype in FLOAT_TYPES}
            dtype = "float32" if "float32" in floats or not floats else min(floats)
            write_table(place, with_stored_dtype(read_raw_config(place.parent), dtype))
        elif name.endswith(INDEX_SUFFIX):
            table = read_table(place, WeightsError)
            metadata = table.get("metadata")
            total = {"total_size": sum(entry.size for entry in before)}
            table["metadata"] = {**metadata, **total} if isinstance(metadata, dict) else total
            write_table(place, table)


def _damaged(file: str, what: str) -> WeightsError:
    return WeightsError(f"{describe(file)}: {what}", hint="run 'ampaudit verify'")
