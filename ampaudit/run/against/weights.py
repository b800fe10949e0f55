"""Matches the weights of two models by name and content, up to the rounding of the dtype that stores them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ampaudit.core.text import format_number
from ampaudit.run.against.graph import ComparedGraph
from ampaudit.run.against.values import agreement, samples_of

__all__ = ["MatchedWeight", "difference_of", "match_weights"]

# relative and absolute tolerance: rounding in either direction, and the smallest numbers of converters
_ROUNDING = {
    torch.float16: (2.0**-10, 1.2e-7),
    torch.bfloat16: (2.0**-7, 1e-37),
    torch.float32: (2.0**-21, 1e-37),
    torch.float64: (2.0**-21, 1e-37),
}

MIN_CLAMPED = 9990.0  # converters replace larger numbers by 10,000, or by a share of the format's largest


@dataclass(frozen=True, slots=True)
class MatchedWeight:
    """A weight of the audited model and its counterpart.

    Attributes:
        other: Placeholder of the reference.
        transposed: Whether it is stored transposed.
        what: Difference beyond rounding; empty if there is none.
        clamped: Whether only numbers beyond the format differ, and are large as well, as in masks.
    """

    other: fx.Node
    transposed: bool = False
    what: str = ""
    clamped: bool = False


def match_weights(reference: ComparedGraph, audited: ComparedGraph) -> dict[fx.Node, MatchedWeight]:
    """Match weights by name, or else by content."""
    by_name = {reference.weight_name(node): node for node in reference.weights}
    alike = _Content(reference)
    matches: dict[fx.Node, MatchedWeight] = {}
    for node, tensor in audited.weights.items():
        other = by_name.get(audited.weight_name(node))
        if other is not None and reference.weights[other].shape == tensor.shape:
            if _rounded_alike(reference.weights[other], tensor):
                matches[node] = MatchedWeight(other)
                continue
            what = difference_of(reference.weights[other], tensor)
            matches[node] = MatchedWeight(other, False, what, _clamped(reference.weights[other], tensor))
        match = alike.find(tensor) if tensor.numel() > 1 else None
        if match is not None and (node not in matches or not match.transposed):
            matches[node] = match
    return matches


def _rounded_alike(reference: torch.Tensor, stored: torch.Tensor) -> bool:
    """Return whether a weight is the reference's, rounded to the dtype in which it is stored."""
    return not bool(_beyond(reference, stored).any())


def _beyond(reference: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    relative, absolute = _ROUNDING.get(stored.dtype, (2.0**-3, 1e-2))
    if reference.dtype in (torch.float16, torch.bfloat16):
        rounding = _ROUNDING[reference.dtype]
        relative, absolute = max(relative, rounding[0]), max(absolute, rounding[1])
    first, second = reference.float(), stored.float()
    return ~((first == second) | ((first - second).abs() <= relative * first.abs() + absolute))


def _clamped(reference: torch.Tensor, stored: torch.Tensor) -> bool:
    """Return whether a weight differs only where the reference exceeds the format, and is large there."""
    first, second = reference.float(), stored.float()
    beyond = first.abs() > torch.finfo(stored.dtype).max
    ended = beyond & (second.abs() >= MIN_CLAMPED) & (first * second > 0)
    return not bool((_beyond(reference, stored) & ~ended).any())


def difference_of(reference: torch.Tensor, stored: torch.Tensor) -> str:
    """Describe how a weight differs from the reference's."""
    square = stored.ndim == 2 and stored.shape[0] == stored.shape[1]
    if square and _rounded_alike(reference.t(), stored):
        return "is transposed"
    beyond = _beyond(reference, stored)
    count = int(beyond.sum())
    apart = torch.where(beyond, (reference.float() - stored.float()).abs().nan_to_num(torch.inf), 0.0)
    place = int(apart.reshape(-1).argmax())
    values = (format_number(float(t.reshape(-1)[place])) for t in (stored, reference))
    index = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(place), stored.shape))
    here, there = values
    return (
        f"differs in {count} of {stored.numel()} elements: [{index}] is {here}, and {there} in the reference"
    )


class _Content:
    """Finds weights by content."""

    def __init__(self, graph: ComparedGraph) -> None:
        self._graph = graph
        self._by_size: defaultdict[int, list[fx.Node]] = defaultdict(list)
        for node, tensor in graph.weights.items():
            self._by_size[tensor.numel()].append(node)
        self._samples: dict[tuple[fx.Node, bool], torch.Tensor] = {}

    def find(self, tensor: torch.Tensor) -> MatchedWeight | None:
        """Return the weight with the same elements, in the same order or transposed."""
        samples = samples_of(tensor)
        for node, transposed in self._candidates(tensor):
            if agreement(self._sampled(node, transposed), samples) < 0.01:
                other = self._graph.weights[node]
                other = other.t() if transposed else other
                if _rounded_alike(other.reshape(tensor.shape), tensor):
                    return MatchedWeight(node, transposed)
        return None

    def _candidates(self, tensor: torch.Tensor) -> Iterator[tuple[fx.Node, bool]]:
        nodes = self._by_size[tensor.numel()]
        yield from ((node, False) for node in nodes)
        yield from ((node, True) for node in nodes if self._graph.weights[node].ndim == 2)

    def _sampled(self, node: fx.Node, transposed: bool) -> torch.Tensor:
        if (node, transposed) not in self._samples:
            weight = self._graph.weights[node]
            self._samples[node, transposed] = samples_of(weight.t() if transposed else weight)
        return self._samples[node, transposed]
