"""Folds casts of weights into the stored weights, or leaves them in the graph over FP32 masters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from ampaudit.checkpoint.safetensors import type_name
from ampaudit.core.errors import UsageError
from ampaudit.export.config import Mode
from ampaudit.trace.converted import ConvertedModel, casts_of, identity
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.functional import for_any_strides
from ampaudit.trace.graph import Placeholder, Site, Slot
from ampaudit.trace.values import LOW_PRECISION_DTYPES


@dataclass(frozen=True, slots=True)
class FoldedGraph:
    """A graph with the stored dtype of each of its weights."""

    graph: fx.Graph  # with the placeholders of the traced model, in the same order
    placeholders: tuple[Placeholder, ...]  # with the dtypes of their values


def fold_casts(converted: ConvertedModel, mode: Mode) -> FoldedGraph:
    """Fold the casts of weights that all uses convert to the same 16-bit format; in ``train``, cast masters.

    Raises:
        UsageError: The mode is ``train``, and the policy clips weights, so masters would differ from them.
    """
    traced = converted.traced
    if mode == "train" and traced.clip is not None:
        raise UsageError(f"--mode train: policy {traced.policy!r} clips weights", hint="use --mode inference")
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(traced.graph, copies)
    graph.output(output)
    for node in graph.nodes:  # the program may run on another device
        node.target = for_any_strides(node.target)
    nodes = {old.name: new for old, new in copies.items()}
    stored: dict[str, torch.dtype] = {}
    if mode == "inference":
        stored = _stored_dtypes(converted)
    else:
        _cast_masters(graph, converted, nodes)
    for weight in traced.graph.find_nodes(op="placeholder"):
        dtype = stored.get(weight.name)
        # a weight that was traced in this dtype has no casts to fold
        if dtype is not None and dtype != weight.meta["val"].dtype:
            casts = casts_of(weight, traced.site_of_node) or []
            _fold(graph, copies[weight], [copies[cast] for cast in casts], dtype)
    graph.lint()
    placeholders = tuple(
        p if p.slot is Slot.INPUT else replace(p, dtype=stored.get(p.node, traced.tensors[p.node].dtype))
        for p in traced.placeholders
    )
    return FoldedGraph(graph, placeholders)


def _stored_dtypes(converted: ConvertedModel) -> dict[str, torch.dtype]:
    """Return the stored dtype of each placeholder for which it differs from the master's.

    Tied placeholders are stored in another dtype only if they agree on it.
    """
    traced = converted.traced
    dtypes_by_name: dict[str, torch.dtype] = {}
    for node in traced.graph.find_nodes(op="placeholder"):
        if node.name in converted.copies:
            dtypes_by_name[node.name] = converted.copies[node.name].dtype
        elif node.name in traced.tensors and (dtype := _only_cast(node, traced.site_of_node)) is not None:
            dtypes_by_name[node.name] = dtype
    tied: dict[int, set[torch.dtype | None]] = {}
    read = {node.name for node in traced.graph.find_nodes(op="placeholder") if node.users}
    for name, tensor in traced.tensors.items():
        if name in read:
            tied.setdefault(id(tensor), set()).add(dtypes_by_name.get(name))
    agreed = {key: dtypes.copy().pop() for key, dtypes in tied.items() if len(dtypes) == 1}
    shared = {name: agreed.get(id(tensor)) for name, tensor in traced.tensors.items()}
    folded_copies = {name: dtypes_by_name[name] for name in converted.copies if name in dtypes_by_name}
    return {name: dtype for name, dtype in shared.items() if dtype is not None} | folded_copies


def _only_cast(node: fx.Node, sites: Mapping[str, Site]) -> torch.dtype | None:
    """Return the 16-bit dtype to which every use of a weight converts it, if there is exactly one."""
    dtypes = {cast.meta["val"].dtype for cast in casts_of(node, sites) or ()}
    (dtype,) = dtypes if len(dtypes) == 1 else (None,)
    return dtype if dtype in LOW_PRECISION_DTYPES and node.meta["val"].dtype is torch.float32 else None


def _fold(graph: fx.Graph, weight: fx.Node, casts: Sequence[fx.Node], dtype: torch.dtype) -> None:
    """Remove the casts of a stored weight and of its views from a graph."""
    for cast in casts:
        source = cast.all_input_nodes[0]
        cast.replace_all_uses_with(source)
        graph.erase_node(cast)
        while source is not weight:
            source.meta = {**source.meta, "val": source.meta["val"].to(dtype)}
            source = source.all_input_nodes[0]  # other inputs are sizes
    weight.meta = {**weight.meta, "val": weight.meta["val"].to(dtype)}


def _cast_masters(graph: fx.Graph, converted: ConvertedModel, nodes: dict[str, fx.Node]) -> None:
    """Cast the masters of weights that the policy stores in 16 bits at the start of the graph."""
    for name, copy in converted.copies.items():
        if name != copy.placeholder:
            continue
        node = nodes[name]
        if not node.users:  # a tied weight is read under another name
            continue
        first_call = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first_call):
            cast = graph.call_function(torch.ops.aten.to.dtype, (node, copy.dtype))
        cast.meta = {**node.meta, "val": node.meta["val"].to(copy.dtype)}
        for user in [user for user in node.users if user is not cast]:
            user.replace_input_with(node, cast)


def folded_weights(
    converted: ConvertedModel, folded: FoldedGraph, ready: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the weights by placeholder in their stored dtypes; a tied weight is rounded once.

    ``ready`` holds weights that are rounded already, by placeholder, such as those of a written file.
    """
    rounded: dict[tuple[object, ...], torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for place in folded.placeholders:
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


def planned_dtypes(model: nn.Module, folded: FoldedGraph) -> dict[str, tuple[str, str]]:
    """Return the stored dtype of each parameter and buffer, and the reason for it, under all of its names."""
    stored: dict[int, tuple[str, str]] = {}
    originals = named_tensors(model)
    for place in folded.placeholders:
        if place.slot in (Slot.INPUT, Slot.CONSTANT) or place.name not in originals:
            continue
        original = originals[place.name]
        dtype = place.dtype or original.dtype
        rounded = dtype != original.dtype
        why = "used only in 16 bits" if rounded else "used in float32 under the policy"
        stored[id(original)] = (type_name(dtype, place.name), why)
    return {name: stored[id(tensor)] for name, tensor in originals.items() if id(tensor) in stored}
