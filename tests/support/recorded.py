"""A module that takes any arguments, and the classes that it knows, for recordings."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import torch
from torch import nn


class Colour(enum.Enum):
    """An enumeration of a user."""

    RED = 1
    BLUE = "b"


class Pair(NamedTuple):
    """A named tuple of a user."""

    first: torch.Tensor
    second: Any = None


@dataclasses.dataclass
class Points:
    """A dataclass of a user."""

    places: torch.Tensor
    names: list[str]
    scale: float = 1.0


class Sink(nn.Module):
    """Keeps its arguments, writes into the tensors among them, and returns a product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.given.append((args, kwargs))
        for tensor in tensors_in((args, kwargs)):
            if not any(tensor.stride()[i] == 0 and tensor.shape[i] > 1 for i in range(tensor.dim())):
                tensor.detach().zero_()
        return self.weight.sum() * 2


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of nested containers and objects."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [found for item in value.values() for found in tensors_in(item)]
    if isinstance(value, list | tuple):
        return [found for item in value for found in tensors_in(item)]
    if isinstance(value, enum.Enum | type):
        return []
    return [found for item in getattr(value, "__dict__", {}).values() for found in tensors_in(item)]
