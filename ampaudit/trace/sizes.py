"""Sizes of a traced tensor as plain numbers; one that depends on the data is not known before a run."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["UNKNOWN_SIZE", "fits", "known_size", "sizes_of", "sizes_vary"]

UNKNOWN_SIZE = -1


def known_size(size: Any) -> int | None:
    """The number that a size is, or ``None`` where it depends on the data (``x[x > 0]``, ``nonzero``)."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    number: int | None = size.node.maybe_as_int()
    return number


def sizes_of(value: Any) -> tuple[int, ...]:
    """The shape of a tensor, with ``UNKNOWN_SIZE`` where it depends on the data; empty for no tensor."""
    numbers = [known_size(size) for size in getattr(value, "shape", ())]
    return tuple(UNKNOWN_SIZE if number is None else number for number in numbers)


def fits(value: torch.Tensor, sizes: tuple[int, ...]) -> bool:
    """Whether a value of a run has the sizes of its traced counterpart, as far as they are known."""
    return value.ndim == len(sizes) and all(
        known in (UNKNOWN_SIZE, size) for size, known in zip(value.shape, sizes, strict=True)
    )


def sizes_vary(value: Any) -> bool:
    """Whether some tensor of a traced result has a size that depends on the data."""
    items = value if isinstance(value, list | tuple) else (value,)
    return any(UNKNOWN_SIZE in sizes_of(item) for item in items)
