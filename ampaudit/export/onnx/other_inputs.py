"""Generates test inputs: other values, larger sizes of open axes, padding, and large integers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ampaudit.source import Batch
from ampaudit.source.onnx.inputs import GraphInput, batch_of, by_name, is_sum, size_of

__all__ = ["OtherBatch", "other_batches"]

_MOST_ELEMENTS = 1 << 22  # limit for each generated input
_LARGER = 3  # factor of each open axis except the batch
_LONGER = 8  # factor of integers that are not indices into a table of known size


class OtherBatch(NamedTuple):
    """A variation of a batch.

    Attributes:
        what: Description of the difference.
        batch: Inputs.
        padded: Whether its masks differ.
    """

    what: str
    batch: Batch
    padded: bool = False


def other_batches(inputs: Sequence[GraphInput], batch: Batch, seed: int) -> Iterator[OtherBatch]:
    """Yield variations of a batch.

    Args:
        inputs: Inputs of the graph.
        batch: Batch to vary.
        seed: Seed of the random order of values.
    """
    values = by_name(batch, [spec.name for spec in inputs])
    random = torch.Generator().manual_seed(seed)
    shuffled = {spec.name: _shuffled(spec, values[spec.name], random) for spec in inputs}
    batches = {spec.sizes[0] if len(spec.sizes) > 1 else None for spec in inputs if spec.sizes}
    current = {
        name: size
        for spec in inputs
        for name, size in zip(spec.sizes or (), values[spec.name].shape, strict=False)
        if isinstance(name, str)
    }
    sizes = {
        name: size + 1 if batches == {name} else _LARGER * size + 1 if size else 0
        for name, size in current.items()
        if not is_sum(name, current)
    }
    tiled = {spec.name: _tiled(spec, shuffled[spec.name], sizes) for spec in inputs}
    if sizes and all(tensor.numel() <= _MOST_ELEMENTS for tensor in tiled.values()):
        axes = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        yield OtherBatch(f"larger sizes ({axes})", batch_of(inputs, tiled))
    else:
        yield OtherBatch("other values", batch_of(inputs, shuffled))
    padded = {spec.name: _padded(spec, values[spec.name]) for spec in inputs}
    if masks := _changed(padded, values):
        what = f"padding at the start ({', '.join(masks)} = 0)"
        yield OtherBatch(what, batch_of(inputs, padded), padded=True)
    extreme = {spec.name: _extreme(spec, values[spec.name]) for spec in inputs}
    if changed := _changed(extreme, values):
        largest = ", ".join(f"{name} up to {int(extreme[name].long().amax())}" for name in changed)
        yield OtherBatch(f"larger integers ({largest})", batch_of(inputs, extreme))


def _changed(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if not torch.equal(tensor, values[name])]


def _extreme(spec: GraphInput, value: torch.Tensor) -> torch.Tensor:
    """Replace integers by the largest ones that are valid; masks and floats stay unchanged."""
    if value.dtype == torch.bool or value.is_floating_point() or not value.numel():
        return value
    if spec.rows or value.dtype.itemsize == 1:
        most = min(spec.rows - 1 if spec.rows else torch.iinfo(value.dtype).max, torch.iinfo(value.dtype).max)
        return torch.full_like(value, most)
    wide = value.long()  # few operations take unsigned integers
    return value if int(wide.abs().amax()) <= 1 else (wide * _LONGER).to(value.dtype)


def _padded(spec: GraphInput, value: torch.Tensor) -> torch.Tensor:
    """Mask the first half of a sequence; inputs other than masks stay unchanged."""
    if not _is_mask(spec, value) or value.ndim < 2:
        return value
    padded = value.clone()
    padded[..., : value.shape[-1] // 2] = 0
    return padded


def _is_mask(spec: GraphInput, value: torch.Tensor) -> bool:
    """Return whether an input contains only 0 and 1 and is not an index, like an attention mask."""
    return not spec.rows and bool(((value == 0) | (value == 1)).all())


def _shuffled(spec: GraphInput, value: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    """Shuffle the elements of a float input, and replace indices by random ones."""
    if spec.rows and not value.is_floating_point():
        return torch.randint(0, spec.rows, value.shape, generator=random).to(value.dtype)
    if not value.is_floating_point():
        return value  # masks and lengths belong to each other
    return value.reshape(-1)[torch.randperm(value.numel(), generator=random)].reshape(value.shape)


def _tiled(spec: GraphInput, value: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
    """Resize the open axes of an input by repeating its elements."""
    for axis, size in enumerate(spec.sizes or ()):
        if value.shape[axis]:
            target = size_of(size, sizes)
            value = value.index_select(axis, torch.arange(target) % value.shape[axis])
    return value
