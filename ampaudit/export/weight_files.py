"""Writes converted weights and their masters piece by piece, measuring the effect of rounding."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ampaudit.checkpoint import FLOAT_TYPES, MANIFEST, MASTER, SINGLE
from ampaudit.checkpoint.open import (
    INDEX_SUFFIX,
    ChangedPart,
    Checkpoint,
    count_megabytes,
    weights_error,
)
from ampaudit.checkpoint.safetensors import (
    Part,
    Shape,
    TensorEntry,
    TypeName,
    WrittenFile,
    clipped,
    dtype_of,
    write_part,
)
from ampaudit.core.formats import NumberFormat
from ampaudit.core.session import Progress, silent
from ampaudit.core.untrusted import describe
from ampaudit.policy.schema import Constants

CASTABLE_TYPES = frozenset({"F32", "F16", "BF16"})
MASTER_INDEX = f"{MASTER}{INDEX_SUFFIX}"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a converted checkpoint, with its safetensors type and the reason for that type."""

    file: str
    dtype: TypeName
    shape: Shape
    crc32: int  # of its bytes
    reason: str
    parameter: str | None = None  # name in the model, if the model is known
    master: str | None = None  # file with the unrounded values, if they differ and masters are kept
    master_dtype: TypeName | None = None  # before rounding, even without a master
    master_crc32: int | None = None

    @property
    def original_dtype(self) -> str:
        """The safetensors type before rounding."""
        return self.master_dtype or self.dtype


@dataclass(slots=True)
class TensorStats:
    """Statistics of rounding one tensor to a format, collected piece by piece while it is copied."""

    peak: float = 0.0  # largest finite magnitude
    overflow: int = 0  # number of finite values that would become infinite
    broken: int = 0  # number of values that are already NaN or infinite

    def add(self, piece: torch.Tensor, form: NumberFormat) -> None:
        """Measure a piece; its elements are counted only if its extremes overflow or are not finite."""
        if not piece.numel():
            return
        low, high = torch.aminmax(piece)
        largest = max(-float(low), float(high))
        if not math.isfinite(largest):
            finite = piece[piece.isfinite()]
            self.broken += piece.numel() - finite.numel()
            largest = float(finite.abs().amax()) if finite.numel() else 0.0
        if largest >= form.overflow_at:
            magnitudes = piece.double().abs()
            self.overflow += int((magnitudes.isfinite() & (magnitudes >= form.overflow_at)).sum())
        self.peak = max(self.peak, largest)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of a converted checkpoint by name, and its tensors."""

    files: dict[str, tuple[str, int]] = field(default_factory=dict)  # digest and size
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    stats: dict[str, TensorStats] = field(default_factory=dict)  # of measured tensors


def write_weights(
    checkpoint: Checkpoint,
    decisions: Mapping[str, StorageDecision],
    directory: Path,
    *,
    masters: bool,
    clip: Constants | None,
    measure: NumberFormat | None = None,
    keep_overflowing: bool = False,
    on_progress: Progress = silent,
) -> WeightFiles:
    """Write working weights, and masters of the rounded ones, into a directory.

    Args:
        checkpoint: Checkpoint to read; shards keep their names.
        decisions: Decision for every tensor.
        directory: Directory to write to.
        masters: Whether to store masters of rounded tensors.
        clip: Limits that values are clipped to before rounding.
        measure: Format whose overflows are counted while tensors are copied.
        keep_overflowing: Whether to store tensors unrounded if ``measure`` counts overflows in them.
        on_progress: Callback with the megabytes read so far and in total.

    Raises:
        OSError: A file cannot be written, for example because the disk is full.
        WeightsError: The checkpoint cannot be read, or two files would have the same name.
    """
    result = WeightFiles()
    _check_names(checkpoint, masters=masters)
    checkpoint = _with_progress(checkpoint, decisions, masters, on_progress)
    for part in checkpoint.parts:
        label = SINGLE if checkpoint.index is None else part.label
        storage = {name: decisions[name] for name in part.entries}
        working = _write_working(part, storage, directory / label, clip, measure, result.stats)
        if keep_overflowing and (overflowing := _overflowing(part, storage, result.stats)):
            storage |= overflowing
            (directory / label).unlink()
            working = _write_working(part, storage, directory / label, clip, None, {})
        result.files[label] = (working.sha256, working.size)
        rounded = [e.name for e in part.entries.values() if storage[e.name].dtype != e.dtype]
        master = None
        if masters and rounded:
            master = write_part(directory / _master_name(label), part, rounded)
            result.files[_master_name(label)] = (master.sha256, master.size)
        for name, entry in part.entries.items():
            result.tensors[name] = _record_of(entry, storage[name], label, working, master)
    if checkpoint.index is not None:
        _write_indexes(checkpoint, directory, result)
    return result


def _check_names(checkpoint: Checkpoint, *, masters: bool) -> None:
    """Reject shards and indexes whose names equal those of other files of the conversion."""
    if checkpoint.index is None:
        return
    labels = [part.label for part in checkpoint.parts]
    names = [MANIFEST, checkpoint.index, *labels]
    names += [MASTER_INDEX, *map(_master_name, labels)] if masters else []
    name, count = Counter(name.casefold() for name in names).most_common(1)[0]
    if count > 1:
        what = f"two files of the conversion would be named {describe(name)!r}"
        raise weights_error(checkpoint.path, what, "rename the shards, and the index, to model*")


def _with_progress(
    checkpoint: Checkpoint, decisions: Mapping[str, StorageDecision], masters: bool, on_progress: Progress
) -> Checkpoint:
    """Return the checkpoint with parts that report progress as they are read."""
    entries = checkpoint.entries.values()
    rounded = (entry.size for entry in entries if masters and decisions[entry.name].dtype != entry.dtype)
    total = sum(entry.size for entry in entries) + sum(rounded)
    counted = count_megabytes("writing MB of weights", total, on_progress)
    return replace(checkpoint, parts=tuple(ChangedPart(part, counted) for part in checkpoint.parts))


def _record_of(
    entry: TensorEntry,
    decision: StorageDecision,
    label: str,
    working: WrittenFile,
    master: WrittenFile | None,
) -> StoredTensor:
    rounded = decision.dtype != entry.dtype
    source = master if rounded else None
    return StoredTensor(
        file=label,
        dtype=decision.dtype,
        shape=entry.shape,
        crc32=working.crc32[entry.name],
        reason=decision.reason,
        parameter=decision.parameter,
        master=_master_name(label) if source is not None else None,
        master_dtype=entry.dtype if rounded else None,
        master_crc32=source.crc32[entry.name] if source is not None else None,
    )


def _overflowing(
    part: Part, decisions: Mapping[str, StorageDecision], stats: Mapping[str, TensorStats]
) -> dict[str, StorageDecision]:
    """Return decisions to store the tensors that overflow in their own type."""
    return {
        name: StorageDecision(entry.dtype, f"its peak of {stats[name].peak:.4g} does not fit")
        for name, entry in part.entries.items()
        if decisions[name].dtype != entry.dtype and name in stats and stats[name].overflow
    }


def _write_working(
    part: Part,
    decisions: Mapping[str, StorageDecision],
    path: Path,
    clip: Constants | None,
    measure: NumberFormat | None,
    stats: dict[str, TensorStats],
) -> WrittenFile:
    """Write one file of working weights, collecting statistics into ``stats``."""
    entries = {name: replace(entry, dtype=decisions[name].dtype) for name, entry in part.entries.items()}

    def rounded(name: str, piece: torch.Tensor) -> torch.Tensor:
        before, after = part.entries[name].dtype, entries[name].dtype
        exact = piece
        if clip is not None and after != before:
            exact = clipped(piece, clip.min_positive, clip.max_finite)
        if measure is not None and before in FLOAT_TYPES:
            stats.setdefault(name, TensorStats()).add(exact, measure)
        return exact if after == before else exact.to(dtype_of(after))

    return write_part(path, ChangedPart(part, rounded, entries))


def _master_name(label: str) -> str:
    start = "model" if label.startswith("model") else ""
    rest = label.removeprefix(start)
    return f"{MASTER}{rest}" if start else f"{MASTER}-{rest}"


def _write_indexes(checkpoint: Checkpoint, directory: Path, result: WeightFiles) -> None:
    """Write an index of the working shards under the old name, and one of the masters."""
    assert checkpoint.index is not None
    for index, masters in ((checkpoint.index, False), (MASTER_INDEX, True)):
        weight_map: dict[str, str] = {}
        total = 0
        for name, stored in result.tensors.items():
            file = stored.master if masters else stored.file
            if file is not None:
                weight_map[name] = file
                dtype = stored.original_dtype if masters else stored.dtype
                total += TensorEntry(name, dtype, stored.shape).size
        if not weight_map:
            continue
        table = {"metadata": {**checkpoint.metadata, "total_size": total}, "weight_map": weight_map}
        (directory / index).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class StorageDecision:
    """The decision about the stored safetensors type of one tensor."""

    dtype: str
    reason: str
    parameter: str | None = None  # name in the model, if the model is known
    used_in_float32: bool = False  # even if the checkpoint stores it in 16 bits


def decide_as_planned(
    checkpoint: Checkpoint, planned: Mapping[str, tuple[str, str]], names: Mapping[str, str]
) -> dict[str, StorageDecision]:
    """Decide by a plan, which holds types and reasons by parameter; other tensors stay unchanged.

    ``names`` maps tensors to their names in the model where these differ.
    """
    decisions: dict[str, StorageDecision] = {}
    for name, entry in checkpoint.entries.items():
        parameter = names.get(name, name)
        dtype, reason = planned.get(parameter, (entry.dtype, "the graph does not use it"))
        in_float32 = dtype == "F32"
        if entry.dtype not in FLOAT_TYPES or dtype not in CASTABLE_TYPES or in_float32:
            dtype = entry.dtype  # stored tensors are never widened
        decisions[name] = StorageDecision(dtype, reason, parameter, in_float32)
    return decisions
