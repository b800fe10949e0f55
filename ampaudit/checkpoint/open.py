"""Opens a checkpoint: a safetensors file, an index of shards, a directory, or a state_dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter

from ampaudit.checkpoint.header import SINGLE, TensorEntry
from ampaudit.checkpoint.parts import InMemory, Part, SafetensorsFile
from ampaudit.core.errors import WeightsError
from ampaudit.core.untrusted import describe, describe_path, read_table, validate

__all__ = ["INDEX_SUFFIX", "PICKLED", "Checkpoint", "open_checkpoint", "weights_error", "weights_in"]

INDEX_SUFFIX = ".safetensors.index.json"
_HINT = "download it again"
PICKLED = (".pt", ".pth", ".bin", ".ckpt")


class _Index(BaseModel):
    model_config = ConfigDict(strict=True)
    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


_INDEX = TypeAdapter(_Index)


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
        return open_checkpoint(weights_in(path))
    if path.name.endswith(INDEX_SUFFIX):
        return _sharded(path)
    if path.suffix == ".safetensors":
        return Checkpoint(path, (SafetensorsFile(path),), None, {})
    if path.suffix in PICKLED:
        from ampaudit.checkpoint.pickled import read_state_dict

        return Checkpoint(path, (InMemory(path.name, read_state_dict(path), {}),), None, {})
    raise WeightsError(
        f"{describe_path(path)}: not a checkpoint format that ampaudit reads",
        hint=f"give a .safetensors file, its {INDEX_SUFFIX}, or a state_dict ({', '.join(PICKLED)})",
    )


def weights_in(directory: Path) -> Path:
    """Find the weights of a model directory: ``model.safetensors`` or its index.

    Raises:
        WeightsError: There is neither.
    """
    for name in (SINGLE, f"model{INDEX_SUFFIX}"):
        if (directory / name).is_file():
            return directory / name
    raise WeightsError(
        f"{directory} contains neither {SINGLE} nor model{INDEX_SUFFIX}", hint="check the path"
    )


def _sharded(path: Path) -> Checkpoint:
    table = read_table(path, WeightsError)
    index = validate(_INDEX, table, path, WeightsError, _HINT)
    shards = sorted(set(index.weight_map.values()))
    for shard in shards:
        strange = shard in ("", "..") or set(shard) & {"\\", "\0"} or len(shard.encode()) > 255
        if strange or PurePosixPath(shard).name != shard:
            raise weights_error(
                path, f"names the shard {describe(shard)!r}", "shards must be next to their index"
            )
        if not (path.parent / shard).is_file():
            raise weights_error(path, f"the shard {describe(shard)} is missing", "download it as well")
    parts = tuple(SafetensorsFile(path.parent / shard) for shard in shards)
    _check_map(path, index.weight_map, parts)
    return Checkpoint(path, parts, path.name, index.metadata)


def _check_map(path: Path, weight_map: Mapping[str, str], parts: tuple[SafetensorsFile, ...]) -> None:
    home: dict[str, str] = {}
    for part in parts:
        for name in part.entries:
            if name in home:
                both = f"{describe(home[name], 50)} and {describe(part.label, 50)}"
                raise weights_error(path, f"tensor {describe(name, 50)!r} is in both {both}", "save it again")
            home[name] = part.label
    for name, shard in weight_map.items():
        if home.get(name) != shard:
            raise weights_error(path, f"tensor {describe(name)!r} is not in {describe(shard)}", _HINT)
    extra = next((name for name in home if name not in weight_map), None)
    if extra is not None:
        where = f"tensor {describe(extra)!r} of {describe(home[extra])}"
        raise weights_error(path, f"{where} is not listed", "save the checkpoint again")


def weights_error(path: Path, what: str, hint: str) -> WeightsError:
    """Return an error that names the file."""
    return WeightsError(f"{describe_path(path)}: {what}", hint=hint)
