"""Reads the tensors of an exported program: raw bytes, with a table of dtypes, sizes and strides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter
from torch import nn

from ampaudit.checkpoint.archive import Archive
from ampaudit.checkpoint.header import MAX_DIMENSIONS
from ampaudit.checkpoint.parts import flat_tensor, misfit
from ampaudit.core.errors import SourceError
from ampaudit.core.untrusted import MAX_TABLE, describe, parse_json, validate
from ampaudit.source.pt2.schema import Integer, Name, Strict, Union

__all__ = ["SERIALIZED_DTYPES", "StoredTensors", "read_tensors"]

_STRIDED = 7
# numbers of torch/_export/serde/schema.py
SERIALIZED_DTYPES: Mapping[int, torch.dtype] = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.complex32,
    10: torch.complex64,
    11: torch.complex128,
    12: torch.bool,
    13: torch.bfloat16,
    28: torch.uint16,
    29: torch.float8_e4m3fn,
    30: torch.float8_e5m2,
    31: torch.float8_e4m3fnuz,
    32: torch.float8_e5m2fnuz,
    33: torch.float8_e8m0fnu,
    34: torch.uint32,
    35: torch.uint64,
}


Size = Annotated[int, Field(ge=0, le=2**62)]


class ConcreteSize(Union):
    as_int: Size


class TensorMeta(Strict):
    """Dtype, sizes, strides and offset (in elements) of a stored tensor."""

    dtype: Integer
    sizes: Annotated[list[ConcreteSize], Field(max_length=MAX_DIMENSIONS)]
    strides: Annotated[list[ConcreteSize], Field(max_length=MAX_DIMENSIONS)]
    storage_offset: ConcreteSize
    requires_grad: bool
    layout: Integer


class Payload(Strict):
    """The location of a tensor's bytes."""

    path_name: Name
    is_param: bool
    use_pickle: bool
    tensor_meta: TensorMeta | None


class PayloadTable(Strict):
    config: dict[Name, Payload]


_PAYLOADS = TypeAdapter(PayloadTable)


@dataclass(slots=True)
class StoredTensors:
    """The tensors in a folder of an archive by name; equal entries share one object."""

    archive: Archive
    folder: str
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _same: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, payload: Payload) -> None:
        """Add a tensor, mapped into memory.

        Raises:
            ValueError: Its bytes are missing, or do not fit its table entry.
        """
        path, meta = payload["path_name"], payload["tensor_meta"]
        if payload["use_pickle"] or meta is None or not path.startswith(("weight_", "tensor_")):
            raise ValueError(f"{describe(name)} is a Python object, which loading would run")
        sizes = tuple(size["as_int"] for size in meta["sizes"])
        strides = tuple(size["as_int"] for size in meta["strides"])
        start = meta["storage_offset"]["as_int"]
        key = (
            path,
            meta["dtype"],
            meta["layout"],
            sizes,
            strides,
            start,
            payload["is_param"],
            meta["requires_grad"],
        )
        if key not in self._same:
            flat = self._flat(name, path, meta)
            if len(sizes) != len(strides):
                raise ValueError(f"{describe(name)} has {len(sizes)} sizes and {len(strides)} strides")
            if why := misfit(sizes, strides, start, flat.numel()):
                raise ValueError(f"{describe(name)} {why}")
            tensor = flat.as_strided(sizes, strides, start)
            if payload["is_param"]:
                tensor = nn.Parameter(tensor, requires_grad=meta["requires_grad"])
            self._same[key] = tensor
        self.tensors[name] = self._same[key]

    def _flat(self, name: str, path: str, meta: TensorMeta) -> torch.Tensor:
        dtype = SERIALIZED_DTYPES.get(meta["dtype"])
        if dtype is None or meta["layout"] != _STRIDED:
            raise ValueError(f"{describe(name)} has a dtype or layout that cannot be read")
        data = self.archive.mapped(f"{self.folder}{path}")
        if len(data) % dtype.itemsize:
            raise ValueError(f"{describe(name)} has {len(data):,} bytes of {dtype}")
        return flat_tensor(data, dtype)


def read_tensors(archive: Archive, folder: str, table: str) -> dict[str, torch.Tensor]:
    """Map the tensors that a table lists.

    Raises:
        SourceError: The table or a tensor cannot be read.
        ValueError: The table does not fit the bytes.
    """
    text = archive.read(f"{folder}{table}", MAX_TABLE)
    payloads = validate(
        *(_PAYLOADS, parse_json(text), Path(archive.path, table), SourceError),
        hint="save the program again with torch.export.save",
    )
    stored = StoredTensors(archive, folder)
    for name, payload in payloads["config"].items():
        stored.add(name, payload)
    return stored.tensors
