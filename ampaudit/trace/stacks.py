"""Tells which matrices of a stacked parameter, such as the experts of a layer, are used.

Code that takes an expert by its number, as Transformers' loop over the experts does, shows the number in the
graph. Where a tensor chooses, as in its ``batched_mm`` and ``grouped_mm``, only a run shows the choice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from ampaudit.trace.functional import overload_of
from ampaudit.trace.graph import Slot, TracedModel
from ampaudit.trace.opnames import base_name, converts, named_arguments

__all__ = [
    "ParameterUse",
    "StackChoice",
    "UnusedSlices",
    "parameter_use",
    "slices_taken",
    "stack_choices",
]


class UnusedSlices(NamedTuple):
    """Matrices of a layer's stacks that nothing takes: their number, of how many, and their elements."""

    unused: int
    of: int
    elements: int


class ParameterUse(NamedTuple):
    """The layers of which a parameter is used, the elements of each layer, and stacks used in part."""

    used: frozenset[str]
    sizes: dict[str, int]
    parts: dict[str, UnusedSlices]


@dataclass(frozen=True, slots=True)
class StackChoice:
    """A call in which a tensor chooses matrices of a stack.

    Attributes:
        parameter: The name of the stack.
        count: Number of matrices in the stack.
        grouped: Whether the tensor holds the end of each matrix's rows instead of matrix numbers.
        index: The node of the tensor.
    """

    parameter: str
    count: int
    grouped: bool
    index: fx.Node

    def chosen(self, index: torch.Tensor) -> torch.Tensor:
        """Return for each matrix whether it is used, for a value of the tensor."""
        if self.grouped:
            return index.diff(prepend=index.new_zeros(1)) > 0
        if index.dtype is torch.bool:
            return index.reshape(self.count, -1).any(1)
        used = torch.zeros(self.count, dtype=torch.bool, device=index.device)
        used[index.flatten()] = True
        return used


def parameter_use(graphs: Collection[TracedModel], choices: Mapping[str, Collection[int]]) -> ParameterUse:
    """Return which parameters, and which parts of stacks, are used by any of the graphs.

    A tied parameter counts for the first layer that has it, and is used if any of its names is.

    Args:
        graphs: Graphs of all batches.
        choices: Numbers of the matrices that tensors chose in a run, by name of the stack.
    """
    used: set[str] = set()
    sizes: dict[str, int] = {}
    stacks: dict[str, torch.Tensor] = {}
    counted: set[int] = set()
    for each in graphs:
        nodes = {node.name: node for node in each.graph.nodes}
        read = {id(tensor) for name, tensor in each.tensors.items() if nodes[name].users}
        for place in each.placeholders:
            if place.slot is Slot.PARAMETER:
                layer, tensor = place.name.rpartition(".")[0], each.tensors[place.node]
                if id(tensor) in read:
                    used.add(layer)
                sizes[layer] = sizes.get(layer, 0) + (0 if id(tensor) in counted else tensor.numel())
                counted.add(id(tensor))
                if tensor.dim() > 2 and id(tensor) in read:
                    stacks[place.name] = tensor
    slices = {part for each in graphs for part in slices_taken(each)}
    slices |= {(name, number) for name, numbers in choices.items() for number in numbers}
    parts: dict[str, UnusedSlices] = {}
    for name, tensor in stacks.items():
        layer = name.rpartition(".")[0]
        unused = sum((name, number) not in slices for number in range(len(tensor)))
        if unused and (name, None) not in slices:
            before = parts[layer].elements if layer in parts else 0
            parts[layer] = UnusedSlices(unused, len(tensor), before + unused * tensor[0].numel())
    return ParameterUse(frozenset(used), sizes, parts)


def slices_taken(traced: TracedModel) -> set[tuple[str, int | None]]:
    """Return which matrices a graph takes: a stack's name with a number, or ``None`` for all of them."""
    choices = stack_choices(traced)
    return {(name, _number(user, count)) for name, count, _, user in _reads(traced) if user not in choices}


def stack_choices(traced: TracedModel) -> dict[fx.Node, StackChoice]:
    """Return the calls in which a tensor chooses."""
    choices: dict[fx.Node, StackChoice] = {}
    for name, count, stack, user in _reads(traced):
        op = overload_of(user.target)
        if op is None:
            continue
        arguments, base = named_arguments(op, user.args, dict(user.kwargs)), base_name(op)
        index: Any = None
        grouped = "grouped_mm" in base
        if grouped and arguments.get("mat2", arguments.get("weight")) is stack:
            index = arguments.get("offs")
        elif base == "index" and arguments["self"] is stack:
            index = arguments["indices"][0]
        elif base == "index_select" and arguments["dim"] == 0:
            index = arguments["index"]
        if isinstance(index, fx.Node):
            choices[user] = StackChoice(name, count, grouped, index)
    return choices


def _reads(traced: TracedModel) -> Iterator[tuple[str, int, fx.Node, fx.Node]]:
    """Yield each stack with its size, the node that has its values, and a node that reads it."""
    nodes = {node.name: node for node in traced.graph.nodes}
    for place in traced.placeholders:
        tensor = traced.tensors.get(place.node)
        if place.slot is Slot.PARAMETER and tensor is not None and tensor.dim() > 2:
            for stack, user in _readers(nodes[place.node]):
                yield place.name, len(tensor), stack, user


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield what reads a stack, behind casts and transposes of its matrices."""
    for user in node.users:
        if converts(user.target) or _transposes_matrices(user):
            yield from _readers(user)
        else:
            yield node, user


def _transposes_matrices(node: fx.Node) -> bool:
    if node.target is not torch.ops.aten.transpose.int:
        return False
    rank = node.meta["val"].dim()
    return all(isinstance(axis, int) and axis % rank for axis in node.args[1:3])


def _number(user: fx.Node, count: int) -> int | None:
    if user.target is torch.ops.aten.select.int and user.args[1] == 0 and isinstance(user.args[2], int):
        return user.args[2] % count
    return None
