"""Makes inputs that nobody gave: other values, larger sizes of open axes, padding, large integers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ampaudit.source import Batch
from ampaudit.source.onnx.inputs import GraphInput, batch_of, by_name, is_sum, size_of

__all__ = ["OtherBatch", "other_batches"]

_MOST_ELEMENTS = 1 << 22  # of an input
_LARGER = 3  # times, for each open axis but that of the batch
_LONGER = 8  # times, for integers of which no table says how large they may be


class OtherBatch(NamedTuple):
    """A batch made from a given one.

    Attributes:
        what: is different, in words.
        batch: the inputs.
        padded: whether it differs by its masks.
    """

    what: str
    batch: Batch
    padded: bool = False


def other_batches(inputs: Sequence[GraphInput], batch: Batch, seed: int) -> Iterator[OtherBatch]:
    """Yield batches made from a given one.

    Args:
        inputs: of the graph.
        batch: a given one.
        seed: of the random order of values.
    """
    values = by_name(batch, [given.name for given in inputs])
    random = torch.Generator().manual_seed(seed)
    shuffled = {given.name: _shuffled(given, values[given.name], random) for given in inputs}
    batches = {given.sizes[0] if len(given.sizes) > 1 else None for given in inputs if given.sizes}
    known = {
        name: size
        for given in inputs
        for name, size in zip(given.sizes or (), values[given.name].shape, strict=False)
        if isinstance(name, str)
    }
    sizes = {
        name: size + 1 if batches == {name} else _LARGER * size + 1 if size else 0
        for name, size in known.items()
        if not is_sum(name, known)
    }
    tiled = {given.name: _tiled(given, shuffled[given.name], sizes) for given in inputs}
    if sizes and all(tensor.numel() <= _MOST_ELEMENTS for tensor in tiled.values()):
        axes = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        yield OtherBatch(f"larger sizes ({axes})", batch_of(inputs, tiled))
    else:
        yield OtherBatch("other values", batch_of(inputs, shuffled))
    padded = {given.name: _padded(given, values[given.name]) for given in inputs}
    if masks := _changed(padded, values):
        what = f"padding at the start ({', '.join(masks)} = 0)"
        yield OtherBatch(what, batch_of(inputs, padded), padded=True)
    extreme = {given.name: _extreme(given, values[given.name]) for given in inputs}
    if changed := _changed(extreme, values):
        largest = ", ".join(f"{name} up to {int(extreme[name].long().amax())}" for name in changed)
        yield OtherBatch(f"larger integers ({largest})", batch_of(inputs, extreme))


def _changed(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if not torch.equal(tensor, values[name])]


def _extreme(given: GraphInput, value: torch.Tensor) -> torch.Tensor:
    """Return the largest integers that an input may hold; masks and floats as they are."""
    if value.dtype == torch.bool or value.is_floating_point() or not value.numel():
        return value
    if given.rows or value.dtype.itemsize == 1:
        most = min(
            given.rows - 1 if given.rows else torch.iinfo(value.dtype).max, torch.iinfo(value.dtype).max
        )
        return torch.full_like(value, most)
    wide = value.long()  # few operations take unsigned integers
    return value if int(wide.abs().amax()) <= 1 else (wide * _LONGER).to(value.dtype)


def _padded(given: GraphInput, value: torch.Tensor) -> torch.Tensor:
    """Return a mask that leaves out the first half of a sequence; other inputs as they are."""
    if not _is_mask(given, value) or value.ndim < 2:
        return value
    padded = value.clone()
    padded[..., : value.shape[-1] // 2] = 0
    return padded


def _is_mask(given: GraphInput, value: torch.Tensor) -> bool:
    """Return whether an input holds but 0 and 1 and is no index, as attention masks do."""
    return not given.rows and bool(((value == 0) | (value == 1)).all())


def _shuffled(given: GraphInput, value: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Return the elements in another order; of indices, others of the table."""
    if given.rows and not value.is_floating_point():
        return torch.randint(0, given.rows, value.shape, generator=random).to(value.dtype)
    if not value.is_floating_point():
        return value  # masks and lengths belong to each other
    return value.reshape(-1)[torch.randperm(value.numel(), generator=random)].reshape(value.shape)


def _tiled(given: GraphInput, value: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
    """Return an input whose open axes have other sizes: its elements again and again."""
    for axis, size in enumerate(given.sizes or ()):
        if value.shape[axis]:
            wanted = size_of(size, sizes)
            value = value.index_select(axis, torch.arange(wanted) % value.shape[axis])
    return value
