"""Lays out the tensors of a call in a file, memory that several of them share once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ampaudit.checkpoint.header import TORCH_NAMES, TensorEntry

__all__ = ["PackedTensor", "pack_tensors"]

_FILE_NAMES = {torch_name: name for name, torch_name in TORCH_NAMES.items() if name != "F4"}
_ALIGNMENT = 16  # bytes of the largest dtype
_Described = tuple[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """An entry of the file, and its bytes on the CPU, which belong to the tensors of the call."""

    entry: TensorEntry
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Span:
    """The bytes of a storage that a tensor lies in."""

    start: int
    stop: int
    tensor: torch.Tensor
    description: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for views of the same elements."""
        return self.start, self.tensor.dtype, self.tensor.shape, self.tensor.stride()


def pack_tensors(tensors: Iterable[_Described]) -> list[PackedTensor]:
    """Lay out tensors; fill the description of each with its place: entry, dtype, shape, strides, offset.

    Tensors that overlap in memory are stored as the range that they cover, with their strides, so that they
    share memory again when they are read. A range with large gaps is stored as contiguous copies instead.
    """
    storages: dict[tuple[str, int], list[_Span]] = {}
    for number, (tensor, description) in enumerate(tensors):
        address = tensor.untyped_storage().data_ptr() or -number - 1  # without elements: alone
        storages.setdefault((str(tensor.device), address), []).append(_span(tensor, description))
    packed: list[PackedTensor] = []
    for spans in storages.values():
        for cluster in _clusters(spans):
            _pack(cluster, packed)
    # entries follow each other without gaps: the widest dtypes first are all aligned
    return sorted(packed, key=lambda item: -(item.entry.size % _ALIGNMENT == 0))


def _span(tensor: torch.Tensor, description: dict[str, Any]) -> _Span:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    width = tensor.dtype.itemsize
    start = int(tensor.storage_offset()) * width
    return _Span(start, start + int(last + 1) * width if tensor.numel() else start, tensor, description)


def _clusters(spans: Sequence[_Span]) -> Iterator[list[_Span]]:
    """Yield groups of spans that overlap."""
    group: list[_Span] = []
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        if group and span.start >= max(other.stop for other in group) and span.key != group[-1].key:
            yield group
            group = []
        group.append(span)
    yield group


def _pack(cluster: Sequence[_Span], packed: list[PackedTensor]) -> None:
    views = {span.key: span.tensor for span in cluster}
    start, stop = cluster[0].start, max(span.stop for span in cluster)
    if stop - start > 2 * sum(view.numel() * view.dtype.itemsize for view in views.values()):
        for key, view in views.items():
            copied = view.contiguous()
            alike = [_span(copied, span.description) for span in cluster if span.key == key]
            _store(alike, alike[0].start, alike[0].stop, packed)
    else:
        several = len({view.dtype for view in views.values()}) > 1
        _store(cluster, start - start % _ALIGNMENT if several else start, stop, packed)


def _store(cluster: Sequence[_Span], start: int, stop: int, packed: list[PackedTensor]) -> None:
    name, tensor = str(len(packed)), cluster[0].tensor
    dtypes = {span.tensor.dtype for span in cluster}
    kind = _FILE_NAMES.get(_name_of(tensor.dtype), "U8") if len(dtypes) == 1 else "U8"
    width = 1 if kind == "U8" else tensor.dtype.itemsize
    alone = len({span.key for span in cluster}) == 1 and tensor.is_contiguous() and kind != "U8"
    shape = tuple(tensor.shape) if alone else ((stop - start) // width,)
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    data.set_(tensor.untyped_storage(), start, (stop - start,), (1,))
    packed.append(PackedTensor(TensorEntry(name, kind, shape), data.cpu()))
    for span in cluster:
        span.description.update(
            tensor=name,
            dtype=_name_of(span.tensor.dtype),
            shape=list(span.tensor.shape),
            stride=list(span.tensor.stride()),
            offset=(span.start - start) // span.tensor.dtype.itemsize,
        )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
