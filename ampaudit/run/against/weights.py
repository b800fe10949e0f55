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

# relative and absolute: rounding either way, and the smallest numbers that converters clamp to
_ROUNDING = {
    torch.float16: (2.0**-10, 1.2e-7),
    torch.bfloat16: (2.0**-7, 1e-37),
    torch.float32: (2.0**-21, 1e-37),
    torch.float64: (2.0**-21, 1e-37),
}

LEAST_CLAMPED = 9990.0  # what converters put for larger numbers: 10,000, or a share of the format's largest


@dataclass(frozen=True, slots=True)
class MatchedWeight:
    """A weight of the audited model and its counterpart.

    Attributes:
        other: placeholder of the reference.
        transposed: whether it is stored transposed.
        what: what differs beyond rounding; empty if nothing does.
        clamped: whether that is numbers that the format lacks and its largest stands for, as in masks.
    """

    other: fx.Node
    transposed: bool = False
    what: str = ""
    clamped: bool = False


def match_weights(reference: ComparedGraph, audited: ComparedGraph) -> dict[fx.Node, MatchedWeight]:
    """Match every weight that has a counterpart: of the same name, or else of the same content."""
    named = {reference.weight_name(node): node for node in reference.weights}
    alike = _Content(reference)
    found: dict[fx.Node, MatchedWeight] = {}
    for node, tensor in audited.weights.items():
        other = named.get(audited.weight_name(node))
        if other is not None and reference.weights[other].shape == tensor.shape:
            if _rounded_alike(reference.weights[other], tensor):
                found[node] = MatchedWeight(other)
                continue
            what = difference_of(reference.weights[other], tensor)
            found[node] = MatchedWeight(other, False, what, _clamped(reference.weights[other], tensor))
        match = alike.find(tensor) if tensor.numel() > 1 else None
        if match is not None and (node not in found or not match.transposed):
            found[node] = match
    return found


def _rounded_alike(reference: torch.Tensor, stored: torch.Tensor) -> bool:
    """Return whether a weight is the reference's in the dtype that it is stored in."""
    return not bool(_beyond(reference, stored).any())


def _beyond(reference: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    relative, absolute = _ROUNDING.get(stored.dtype, (2.0**-3, 1e-2))
    if reference.dtype in (torch.float16, torch.bfloat16):
        own = _ROUNDING[reference.dtype]
        relative, absolute = max(relative, own[0]), max(absolute, own[1])
    first, second = reference.float(), stored.float()
    return ~((first == second) | ((first - second).abs() <= relative * first.abs() + absolute))


def _clamped(reference: torch.Tensor, stored: torch.Tensor) -> bool:
    """Return whether a weight differs only where the reference is out of range, and it is large as well."""
    first, second = reference.float(), stored.float()
    beyond = first.abs() > torch.finfo(stored.dtype).max
    ended = beyond & (second.abs() >= LEAST_CLAMPED) & (first * second > 0)
    return not bool((_beyond(reference, stored) & ~ended).any())


def difference_of(reference: torch.Tensor, stored: torch.Tensor) -> str:
    """Describe how a weight differs from that of the same name."""
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
        """Return the weight with the same elements, in its order or transposed."""
        samples = samples_of(tensor)
        for node, transposed in self._candidates(tensor):
            if agreement(self._sampled(node, transposed), samples) < 0.01:
                known = self._graph.weights[node]
                known = known.t() if transposed else known
                if _rounded_alike(known.reshape(tensor.shape), tensor):
                    return MatchedWeight(node, transposed)
        return None

    def _candidates(self, tensor: torch.Tensor) -> Iterator[tuple[fx.Node, bool]]:
        for node in self._by_size[tensor.numel()]:
            yield node, False
        for node in self._by_size[tensor.numel()]:
            if self._graph.weights[node].ndim == 2:
                yield node, True

    def _sampled(self, node: fx.Node, transposed: bool) -> torch.Tensor:
        if (node, transposed) not in self._samples:
            known = self._graph.weights[node]
            self._samples[node, transposed] = samples_of(known.t() if transposed else known)
        return self._samples[node, transposed]
