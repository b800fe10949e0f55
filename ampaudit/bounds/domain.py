"""Determines the range of each input: stated, from an embedding's rows, or from the batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from ampaudit.core.assumptions import Assumption, parse_assumption
from ampaudit.core.errors import UsageError, did_you_mean
from ampaudit.trace.graph import Placeholder, Slot, TracedModel

__all__ = ["assumptions", "contains"]


def assumptions(
    traced: TracedModel, batches: Sequence[Sequence[torch.Tensor]], stated: Iterable[str]
) -> dict[str, Assumption]:
    """Return the range of each input of the graph, by placeholder.

    Args:
        traced: The graph.
        batches: Tensors of each batch, in the order of the graph's inputs.
        stated: The user's assumptions as text.

    Raises:
        UsageError: An assumption is about an input that the model does not have.
    """
    places = [place for place in traced.placeholders if place.slot is Slot.INPUT]
    ranges = {name: (low, high) for name, low, high in map(parse_assumption, stated)}
    names = [place.name for place in places]
    for name in ranges:
        if name not in names and name != "input":
            hint = did_you_mean(name, [*names, "input"]) + f"inputs: {', '.join(names)}"
            raise UsageError(f"--assume {name}: the model has no such input", hint=hint)
    return {place.node: _of(traced, place, index, batches, ranges) for index, place in enumerate(places)}


def _of(
    traced: TracedModel,
    place: Placeholder,
    index: int,
    batches: Sequence[Sequence[torch.Tensor]],
    ranges: dict[str, tuple[float, float]],
) -> Assumption:
    floating = place.dtype is not None and place.dtype.is_floating_point
    if place.name in ranges or ("input" in ranges and floating):
        low, high = ranges.get(place.name, ranges.get("input", (0.0, 0.0)))
        return Assumption(place.name, low, high, "stated")
    node = next(n for n in traced.graph.nodes if n.name == place.node)
    tables = [u for u in node.users if str(u.target).startswith("aten.embedding.") and u.args[1] is node]
    if tables and len(tables) == len(node.users):
        rows = min(int(table.args[0].meta["val"].shape[0]) for table in tables)
        return Assumption(place.name, 0.0, float(rows - 1), "embedding table")
    ends = [_range(tensors[index]) for tensors in batches if tensors[index].numel()]
    low, high = min((e[0] for e in ends), default=0.0), max((e[1] for e in ends), default=0.0)
    return Assumption(place.name, low, high, "batches")


def contains(
    assumed: Iterable[Assumption], traced: TracedModel, batches: Sequence[Sequence[torch.Tensor]]
) -> bool:
    """Return whether batches satisfy the assumptions about a graph's inputs."""
    by_name = {each.name: each for each in assumed}
    names = [place.name for place in traced.placeholders if place.slot is Slot.INPUT]
    for name, tensors in ((name, [batch[i] for batch in batches]) for i, name in enumerate(names)):
        ends = [_range(tensor) for tensor in tensors if tensor.numel()]
        assumption = by_name.get(name)
        if assumption is None or any(low < assumption.low or high > assumption.high for low, high in ends):
            return False
    return True


def _range(tensor: torch.Tensor) -> tuple[float, float]:
    value = tensor.to(torch.int8) if tensor.dtype is torch.bool else tensor
    if value.is_complex():
        return -math.inf, math.inf
    return float(value.amin()), float(value.amax())
