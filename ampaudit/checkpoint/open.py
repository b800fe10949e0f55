"""Opens a checkpoint: a safetensors file, an index of shards, a directory, or a state_dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, TypeAdapter

from ampaudit.checkpoint import SINGLE
from ampaudit.checkpoint.pickled import read_state_dict
from ampaudit.checkpoint.safetensors import InMemory, MappedWeights, Part, SafetensorsFile, TensorEntry
from ampaudit.core.errors import WeightsError
from ampaudit.core.session import Progress
from ampaudit.core.untrusted import describe, describe_path, read_table, validate

INDEX_SUFFIX = ".safetensors.index.json"
_HINT = "download it again"
PICKLED = (".pt", ".pth", ".bin", ".ckpt")


class _Index(BaseModel):
    model_config = ConfigDict(strict=True)
    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


_INDEX = TypeAdapter(_Index)


Change = Callable[[str, torch.Tensor], torch.Tensor]  # of a piece of the tensor with this name


class ChangedPart:
    """A part whose pieces are changed as they are read."""

    def __init__(self, part: Part, change: Change, entries: dict[str, TensorEntry] | None = None) -> None:
        self.label, self.metadata, self.entries = part.label, part.metadata, entries or part.entries
        self._part, self._change = part, change

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """Yield the changed pieces."""
        return map(partial(self._change, name), self._part.pieces(name))


def count_megabytes(phase: str, total: int, on_progress: Progress) -> Change:
    """Return a function that adds up the bytes of pieces, and reports them in megabytes."""
    done = 0

    def counted(_: str, piece: torch.Tensor) -> torch.Tensor:
        nonlocal done
        done = min(done + piece.nbytes, total)  # a tensor may be read again
        on_progress(phase, done // 10**6, total // 10**6)
        return piece

    return counted


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint."""

    path: Path
    parts: tuple[Part, ...]  # its files, in the order of their names
    index: str | None  # name of the index file
    metadata: Mapping[str, Any]  # of the index
    widened: int = 0  # bytes by which dequantized tensors are larger than in the files

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Every tensor, in the order of the parts."""
        return {name: entry for part in self.parts for name, entry in part.entries.items()}


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the headers of a checkpoint, without reading tensors or running code.

    Raises:
        WeightsError: The checkpoint is missing, corrupt, hostile, or of an unsupported kind.
    """
    if path.is_dir():
        path = _weights_in(path)
    if path.suffix in PICKLED:
        tensors = read_state_dict(path)
        return Checkpoint(path, (InMemory(path.name, tensors, {}),), None, {})
    if path.suffix == ".safetensors":
        return Checkpoint(path, (SafetensorsFile(path),), None, {})
    if path.name.endswith(INDEX_SUFFIX):
        return _sharded(path)
    raise WeightsError(
        f"{describe_path(path)}: not a checkpoint format that ampaudit reads",
        hint=f"give a .safetensors file, its {INDEX_SUFFIX}, or a state_dict ({', '.join(PICKLED)})",
    )


def map_checkpoint(path: Path) -> MappedWeights:
    """Map every tensor of a checkpoint without reading it.

    Raises:
        WeightsError: A tensor has a type that torch lacks, or see ``open_checkpoint``.
    """
    weights = MappedWeights({})
    for part in open_checkpoint(path).parts:
        if isinstance(part, InMemory):
            weights.tensors.update(part.tensors)
        elif isinstance(part, SafetensorsFile):
            part.map_into(weights)
    return weights


def _weights_in(directory: Path) -> Path:
    """Find the weights of a model directory: ``model.safetensors`` or its index."""
    for name in (SINGLE, f"model{INDEX_SUFFIX}"):
        if (directory / name).is_file():
            return directory / name
    raise WeightsError(
        f"{directory} contains neither {SINGLE} nor model{INDEX_SUFFIX}",
        hint="check the path, or write them with from_pretrained(DIR).save_pretrained(DIR)",
    )


def _sharded(path: Path) -> Checkpoint:
    table = read_table(path, WeightsError)
    index = validate(_INDEX, table, path, WeightsError, _HINT)
    shards = sorted(set(index.weight_map.values()))
    for shard in shards:
        unsafe = shard in ("", "..") or set(shard) & {"\\", "\0"} or len(shard.encode()) > 255
        if unsafe or PurePosixPath(shard).name != shard:
            raise weights_error(
                path, f"names the shard {describe(shard)!r}", "shards must be next to their index"
            )
        if not (path.parent / shard).is_file():
            raise weights_error(path, f"the shard {describe(shard)} is missing", "download it as well")
    parts = tuple(SafetensorsFile(path.parent / shard) for shard in shards)
    _check_map(path, index.weight_map, parts)
    return Checkpoint(path, parts, path.name, index.metadata)


def _check_map(path: Path, weight_map: Mapping[str, str], parts: tuple[SafetensorsFile, ...]) -> None:
    file_of: dict[str, str] = {}
    for part in parts:
        for name in part.entries:
            if name in file_of:
                both = f"{describe(file_of[name], 50)} and {describe(part.label, 50)}"
                raise weights_error(path, f"tensor {describe(name, 50)!r} is in both {both}", "save it again")
            file_of[name] = part.label
    for name, shard in weight_map.items():
        if file_of.get(name) != shard:
            raise weights_error(path, f"tensor {describe(name)!r} is not in {describe(shard)}", _HINT)
    extra = next((name for name in file_of if name not in weight_map), None)
    if extra is not None:
        where = f"tensor {describe(extra)!r} of {describe(file_of[extra])}"
        raise weights_error(path, f"{where} is not listed", "save the checkpoint again")


def weights_error(path: Path, what: str, hint: str) -> WeightsError:
    """Return an error that names the file."""
    return WeightsError(f"{describe_path(path)}: {what}", hint=hint)
