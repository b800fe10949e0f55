"""The converted graph as it is deployed: casts of weights folded into the stored weights, or left in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.core.errors import UsageError
from ampaudit.export.config import Mode
from ampaudit.trace.converted import ConvertedModel, identity
from ampaudit.trace.graph import Placeholder, Role, Site, Slot
from ampaudit.trace.opnames import mutated_arguments

__all__ = ["Deployed", "deploy", "weights_of"]

_LOWER = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Deployed:
    """A graph, and for each of its weights how it is stored.

    Attributes:
        graph: its placeholders are those of the traced model, in the same order.
        placeholders: the same, each with the dtype in which its value is given.
        casts: conversions of weights that are left in the graph.
        folded: those that the stored weights have made unnecessary.
    """

    graph: fx.Graph
    placeholders: tuple[Placeholder, ...]
    casts: int
    folded: int


def deploy(converted: ConvertedModel, mode: Mode) -> Deployed:
    """For inference, a weight that every use takes in one 16-bit format is stored in it; for training, none.

    Raises:
        UsageError: training under a policy that clips weights: its masters would not be what it trains.
    """
    traced = converted.traced
    if mode == "train" and traced.clip is not None:
        raise UsageError(f"--mode train: policy {traced.policy!r} clips weights", hint="use --mode inference")
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(traced.graph, made)
    graph.output(output)
    nodes = {old.name: new for old, new in made.items()}
    stored = _stored(converted) if mode == "inference" else {}
    folded = _fold(graph, nodes, stored)
    if mode == "train":
        _cast_stored(graph, converted, nodes)
    graph.lint()
    placeholders = tuple(
        Placeholder(p.node, p.slot, p.name, stored.get(p.node, _own_dtype(p, traced.tensors)))
        for p in traced.placeholders
    )
    casts = sum(site.role is Role.WEIGHT_CAST for site in traced.sites) - folded
    return Deployed(graph, placeholders, casts, folded)


def _own_dtype(place: Placeholder, tensors: dict[str, torch.Tensor]) -> torch.dtype | None:
    return place.dtype if place.slot is Slot.INPUT else tensors[place.node].dtype


def _stored(converted: ConvertedModel) -> dict[str, torch.dtype]:
    """Placeholders whose value is given in another dtype than the master's; tied ones alike."""
    traced = converted.traced
    wanted: dict[str, torch.dtype] = {}
    for node in traced.graph.find_nodes(op="placeholder"):
        if node.name in converted.copies:
            wanted[node.name] = converted.copies[node.name].dtype
        elif node.name in traced.tensors and (dtype := _only_cast(node, traced.site_of_node)) is not None:
            wanted[node.name] = dtype
    tied: dict[int, set[torch.dtype | None]] = {}
    for name, tensor in traced.tensors.items():
        tied.setdefault(id(tensor), set()).add(wanted.get(name))
    alike = {name for name in wanted if len(tied[id(traced.tensors[name])]) == 1}
    return {name: dtype for name, dtype in wanted.items() if name in alike or name in converted.copies}


def _only_cast(node: fx.Node, sites: Mapping[str, Site]) -> torch.dtype | None:
    """The one narrower dtype to which every use of a weight converts it."""
    found: set[torch.dtype] = set()
    for user in node.users:
        site = sites.get(user.name)
        if site is None or site.role is not Role.WEIGHT_CAST or any(map(_writes, user.users)):
            return None
        found.add(user.meta["val"].dtype)
    (dtype,) = found if len(found) == 1 else (None,)
    return dtype if dtype in _LOWER and node.meta["val"].dtype is torch.float32 else None


def _writes(node: fx.Node) -> bool:
    """Whether a call may write to what it is given: a stored weight must not be that."""
    return isinstance(node.target, OpOverload) and bool(mutated_arguments(node.target))


def _fold(graph: fx.Graph, nodes: dict[str, fx.Node], stored: dict[str, torch.dtype]) -> int:
    count = 0
    for name, dtype in stored.items():
        node = nodes[name]
        if node.meta["val"].dtype == dtype:
            continue  # the trace was made with it
        for user in list(node.users):
            user.replace_all_uses_with(node)
            graph.erase_node(user)
            count += 1
        node.meta = {**node.meta, "val": node.meta["val"].to(dtype)}
    return count


def _cast_stored(graph: fx.Graph, converted: ConvertedModel, nodes: dict[str, fx.Node]) -> None:
    """Weights that the policy stores in 16 bits are masters here, so each is cast where it enters."""
    for name, copy in converted.copies.items():
        if name != copy.placeholder:
            continue
        node = nodes[name]
        with graph.inserting_before(_first_call(graph)):
            cast = graph.call_function(torch.ops.aten.to.dtype, (node, copy.dtype))
        cast.meta = {**node.meta, "val": node.meta["val"].to(copy.dtype)}
        for user in [user for user in node.users if user is not cast]:
            user.replace_input_with(node, cast)


def _first_call(graph: fx.Graph) -> fx.Node:
    first: fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    return first


def weights_of(
    converted: ConvertedModel, deployed: Deployed, ready: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The weights by placeholder, each in the dtype in which it is given; a tied one is rounded once.

    Args:
        converted: has the masters; one that is not rounded is used as it is.
        deployed: says which are rounded.
        ready: rounded ones that are there already, by placeholder: those of a file that was written.
    """
    rounded: dict[tuple[object, ...], torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for place in deployed.placeholders:
        if place.slot is Slot.INPUT or place.dtype is None:
            continue
        master = converted.masters[place.node].detach()
        if place.dtype == master.dtype:
            values[place.node] = master
            continue
        key = (identity(master), place.dtype)
        if place.node in ready and ready[place.node].dtype == place.dtype:
            rounded[key] = ready[place.node]
        elif key not in rounded:
            rounded[key] = converted.unrounded(place.node, master).to(place.dtype)
        values[place.node] = rounded[key]
    return values
