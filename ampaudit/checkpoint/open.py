"""Opens a checkpoint: a safetensors file, an index of shards, a directory, or a state_dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ampaudit.checkpoint.header import TensorEntry, unique_json
from ampaudit.checkpoint.layout import SINGLE
from ampaudit.checkpoint.parts import InMemory, Part, SafetensorsFile
from ampaudit.core.errors import WeightsError

__all__ = ["INDEX_SUFFIX", "PICKLED", "Checkpoint", "open_checkpoint", "weights_in"]

INDEX_SUFFIX = ".safetensors.index.json"
PICKLED = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint.

    Attributes:
        path: its path.
        parts: its files, in the order of their names.
        index: name of the index file, if there is one.
        metadata: metadata of the index.
    """

    path: Path
    parts: tuple[Part, ...]
    index: str | None
    metadata: Mapping[str, Any]

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Every tensor, in the order of the parts."""
        return {name: entry for part in self.parts for name, entry in part.entries.items()}


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the headers of a checkpoint, without reading tensors or running code.

    Raises:
        WeightsError: missing, corrupt, hostile, or of an unsupported kind.
    """
    if path.is_dir():
        return open_checkpoint(weights_in(path))
    if path.name.endswith(INDEX_SUFFIX):
        return _sharded(path)
    if path.suffix == ".safetensors":
        return Checkpoint(path, (SafetensorsFile(path),), None, {})
    if path.suffix in PICKLED:
        from ampaudit.checkpoint.pickled import read_state_dict

        part = InMemory(path.name, read_state_dict(path), {})
        return Checkpoint(path, (part,), None, {})
    raise WeightsError(
        f"{path}: not a checkpoint format that ampaudit reads",
        hint=f"give a .safetensors file, its {INDEX_SUFFIX}, or a state_dict ({', '.join(PICKLED)})",
    )


def weights_in(directory: Path) -> Path:
    """Find the weights of a model directory: ``model.safetensors`` or its index.

    Raises:
        WeightsError: there is neither.
    """
    for name in (SINGLE, f"model{INDEX_SUFFIX}"):
        if (directory / name).is_file():
            return directory / name
    raise WeightsError(
        f"{directory} contains neither {SINGLE} nor model{INDEX_SUFFIX}", hint="check the path"
    )


def _sharded(path: Path) -> Checkpoint:
    table = _index(path)
    shards = sorted(set(table["weight_map"].values()))
    for shard in shards:
        if not shard or PurePosixPath(shard).name != shard or "\\" in shard or shard in (".", ".."):
            raise WeightsError(
                f"{path}: names the shard {shard!r}", hint="shards must be next to their index"
            )
        if not (path.parent / shard).is_file():
            raise WeightsError(f"{path}: the shard {shard} is missing", hint="download it as well")
    parts = tuple(SafetensorsFile(path.parent / shard) for shard in shards)
    _check_map(path, table["weight_map"], parts)
    metadata = table.get("metadata")
    return Checkpoint(path, parts, path.name, metadata if isinstance(metadata, dict) else {})


def _index(path: Path) -> dict[str, Any]:
    try:
        table = unique_json(path.read_bytes())
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror}", hint="check the path") from error
    except ValueError as error:
        raise WeightsError(f"{path}: not a valid index: {error}", hint="download it again") from error
    weight_map = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise WeightsError(f"{path}: has no weight_map from names to files", hint="download it again")
    return dict(table)


def _check_map(path: Path, weight_map: Mapping[str, str], parts: tuple[SafetensorsFile, ...]) -> None:
    home: dict[str, str] = {}
    for part in parts:
        for name in part.entries:
            if name in home:
                raise WeightsError(
                    f"{path}: tensor {name!r} is in both {home[name]} and {part.label}",
                    hint="save the checkpoint again",
                )
            home[name] = part.label
    for name, shard in weight_map.items():
        if home.get(name) != shard:
            raise WeightsError(f"{path}: tensor {name!r} is not in {shard}", hint="download the shards again")
    extra = next((name for name in home if name not in weight_map), None)
    if extra is not None:
        raise WeightsError(
            f"{path}: tensor {extra!r} of {home[extra]} is not listed", hint="save the checkpoint again"
        )
