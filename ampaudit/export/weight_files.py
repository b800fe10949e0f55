"""Writes the converted weights and their masters, file by file and piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ampaudit.checkpoint.header import TensorEntry
from ampaudit.checkpoint.layout import MASTER, SINGLE
from ampaudit.checkpoint.open import INDEX_SUFFIX, Checkpoint
from ampaudit.checkpoint.parts import Part, dtype_of
from ampaudit.checkpoint.write import Written, write_part, write_safetensors
from ampaudit.core.formats import NumberFormat
from ampaudit.export.storage import CASTABLE_TYPES, StorageDecision
from ampaudit.export.tensor_stats import TensorScan, TensorStats

__all__ = ["Change", "StoredTensor", "ValueScan", "WeightFiles", "write_weights"]

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a converted checkpoint.

    Attributes:
        file: the file that holds it.
        dtype: its safetensors type there.
        shape: its sizes.
        crc32: of its bytes.
        reason: why it has this type.
        parameter: the model's name of it, where the model is known.
        master: the file that holds what it was rounded from, ``None`` if it is what it was, or was not kept.
        master_dtype: type of that, also where it was not kept.
        master_crc32: of its bytes.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    crc32: int
    reason: str
    parameter: str | None = None
    master: str | None = None
    master_dtype: str | None = None
    master_crc32: int | None = None


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """What was written.

    Attributes:
        files: digest and size of each file.
        tensors: place of each tensor.
        surveys: what the values of each showed, where they were looked at.
    """

    files: dict[str, tuple[str, int]]
    tensors: dict[str, StoredTensor]
    surveys: dict[str, TensorStats]


@dataclass(frozen=True, slots=True)
class ValueScan:
    """How values are looked at on their way: against a format, and whether what overflows is kept instead."""

    form: NumberFormat
    keep_overflowing: bool


def write_weights(
    checkpoint: Checkpoint,
    choices: Mapping[str, StorageDecision],
    directory: Path,
    *,
    masters: bool,
    change: Change | None = None,
    look: ValueScan | None = None,
) -> WeightFiles:
    """Write working weights, and masters of those that are rounded, into a directory.

    Args:
        checkpoint: where the tensors are read from; shards stay shards, under their names.
        choices: for every tensor.
        directory: to write to.
        masters: whether to keep what is rounded.
        change: applied to values before they are rounded (a policy that clips).
        look: at the values, while they pass.

    Raises:
        OSError: the disk is full, say.
        WeightsError: the checkpoint cannot be read.
    """
    result = WeightFiles({}, {}, {})
    for part in checkpoint.parts:
        label = SINGLE if checkpoint.index is None else part.label
        made = {name: choices[name] for name in part.entries}
        written = _write_working(part, made, directory / label, change, look, result.surveys)
        if look is not None and look.keep_overflowing and (kept := _too_large(part, made, result.surveys)):
            made |= kept
            (directory / label).unlink()
            written = _write_working(part, made, directory / label, change, None, {})
        result.files[label] = (written.sha256, written.size)
        master = _write_masters(part, made, directory, label) if masters else None
        if master is not None:
            result.files[_master_name(label)] = (master.sha256, master.size)
        for name, entry in part.entries.items():
            result.tensors[name] = _stored(entry, made[name], label, written, master)
    if checkpoint.index is not None:
        _write_indexes(checkpoint, directory, result)
    return result


def _stored(
    entry: TensorEntry, choice: StorageDecision, label: str, written: Written, master: Written | None
) -> StoredTensor:
    rounded = choice.dtype != entry.dtype
    kept = master if rounded else None
    return StoredTensor(
        file=label,
        dtype=choice.dtype,
        shape=entry.shape,
        crc32=written.crc32[entry.name],
        reason=choice.reason,
        parameter=choice.parameter,
        master=_master_name(label) if kept is not None else None,
        master_dtype=entry.dtype if rounded else None,
        master_crc32=kept.crc32[entry.name] if kept is not None else None,
    )


def _too_large(
    part: Part, choices: Mapping[str, StorageDecision], surveys: Mapping[str, TensorStats]
) -> dict[str, StorageDecision]:
    """Tensors that the format cannot hold, kept as they are."""
    return {
        name: StorageDecision(entry.dtype, f"its peak of {surveys[name].peak:.4g} does not fit")
        for name, entry in part.entries.items()
        if choices[name].dtype != entry.dtype and name in surveys and surveys[name].overflow
    }


def _write_working(
    part: Part,
    choices: Mapping[str, StorageDecision],
    path: Path,
    change: Change | None,
    look: ValueScan | None,
    surveys: dict[str, TensorStats],
) -> Written:
    """One file; what was seen on the way is put into ``surveys``."""

    def rounded(entry: TensorEntry) -> Iterator[torch.Tensor]:
        surveyor = TensorScan(look.form) if look is not None and entry.dtype in CASTABLE_TYPES else None
        dtype = dtype_of(choices[entry.name].dtype) if choices[entry.name].dtype != entry.dtype else None
        for piece in part.pieces(entry.name):
            exact = piece if change is None or dtype is None else change(piece)
            if surveyor is not None:
                surveyor.look(exact)
            yield exact if dtype is None else exact.to(dtype)
        if surveyor is not None:
            surveys[entry.name] = surveyor.found

    entries = [TensorEntry(e.name, choices[e.name].dtype, e.shape) for e in part.entries.values()]
    pieces = ((entry.name, rounded(entry)) for entry in part.entries.values())
    return write_safetensors(path, entries, part.metadata, pieces)


def _write_masters(
    part: Part, choices: Mapping[str, StorageDecision], directory: Path, label: str
) -> Written | None:
    rounded = [e.name for e in part.entries.values() if choices[e.name].dtype != e.dtype]
    return write_part(directory / _master_name(label), part, rounded) if rounded else None


def _master_name(label: str) -> str:
    start = "model" if label.startswith("model") else ""
    rest = label.removeprefix(start)
    return f"{MASTER}{rest}" if start else f"{MASTER}-{rest}"


def _size(name: str, stored: StoredTensor, master: bool) -> int:
    dtype = stored.master_dtype if master and stored.master_dtype is not None else stored.dtype
    return TensorEntry(name, dtype, stored.shape).size


def _write_indexes(checkpoint: Checkpoint, directory: Path, result: WeightFiles) -> None:
    """An index for the working shards under the old one's name, and one for the masters."""
    assert checkpoint.index is not None
    working = {name: stored.file for name, stored in result.tensors.items()}
    kept = {name: stored.master for name, stored in result.tensors.items() if stored.master is not None}
    tables = {checkpoint.index: working, f"{MASTER}{INDEX_SUFFIX}": kept}
    for name, weight_map in tables.items():
        if not weight_map:
            continue
        total = sum(_size(n, result.tensors[n], name != checkpoint.index) for n in weight_map)
        table = {"metadata": {**checkpoint.metadata, "total_size": total}, "weight_map": weight_map}
        (directory / name).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
