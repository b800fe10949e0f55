"""Compares the files of a converted directory with its manifest, and names what differs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import torch

from ampaudit.checkpoint.parts import SafetensorsFile, dtype_of
from ampaudit.core.errors import AuditError
from ampaudit.export.manifest import Manifest, digest_of, files_under
from ampaudit.export.weight_files import StoredTensor
from ampaudit.report.problem import Problem
from ampaudit.trace.converted import clipped

__all__ = ["check_files", "check_rounding"]


def check_files(directory: Path, manifest: Manifest) -> Iterator[Problem]:
    """Find missing, truncated, changed and extra files, and name the tensors that differ."""
    for name, record in manifest.files.items():
        path = directory / name
        if not path.is_file():
            yield Problem("missing", name, "is in the manifest but not in the directory")
            continue
        size = path.stat().st_size
        if size < record.size:
            yield Problem("truncated", name, f"has {size:,} of {record.size:,} bytes")
        elif digest_of(path).sha256 != record.sha256:
            yield Problem("changed", name, "its SHA-256 is not the one in the manifest")
        else:
            continue
        if name.endswith(".safetensors"):
            yield from _changed_tensors(path, name, manifest)
    for name in files_under(directory):
        if name not in manifest.files:
            yield Problem("extra", name, "is in the directory but not in the manifest")


def _changed_tensors(path: Path, name: str, manifest: Manifest) -> Iterator[Problem]:
    try:
        part = SafetensorsFile(path, name)
    except AuditError as error:
        yield Problem("changed", name, str(error.args[0]).removeprefix(f"{path}: "))
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


def check_rounding(directory: Path, manifest: Manifest) -> Iterator[Problem]:
    """Find working weights that are not their rounded masters."""
    parts: dict[str, SafetensorsFile] = {}

    def part(name: str) -> SafetensorsFile:
        if name not in parts:
            parts[name] = SafetensorsFile(directory / name, name)
        return parts[name]

    for name, stored in manifest.tensors.items():
        if stored.master is None:
            continue
        try:
            wrong = _count_differences(part(stored.file), part(stored.master), name, stored, manifest)
        except (AuditError, KeyError):
            continue  # reported already: the file or the tensor is missing
        if wrong:
            yield Problem(
                "rounding", f"{stored.file}: {name}", f"{wrong:,} values differ from their rounded master"
            )


def _count_differences(
    working: SafetensorsFile, master: SafetensorsFile, name: str, stored: StoredTensor, manifest: Manifest
) -> int:
    dtype, wrong = dtype_of(stored.dtype), 0
    if working.entries[name].dtype != stored.dtype or master.entries[name].dtype != stored.master_dtype:
        return 0  # reported by the check of the files
    assert dtype is not None
    for ours, kept in zip_longest(working.pieces(name), master.pieces(name)):
        exact = kept if manifest.clip is None else clipped(kept, manifest.clip)
        wrong += int((exact.to(dtype).view(torch.int16) != ours.view(torch.int16)).sum())
    return wrong
