"""Builds a traced model from an exported program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ampaudit.policy import RuleSet
from ampaudit.trace.entry import ENTRY_NAME, Entry, layer_path
from ampaudit.trace.fake_model import constant_masters, named_tensors
from ampaudit.trace.flatten import flat_graph
from ampaudit.trace.graph import Placeholder, Slot, TracedModel
from ampaudit.trace.site_table import build_sites
from ampaudit.trace.state import StateChange
from ampaudit.trace.storage import split_ties, storage_notes

__all__ = ["assembled"]

_SLOTS = {
    InputKind.PARAMETER: Slot.PARAMETER,
    InputKind.BUFFER: Slot.BUFFER,
    InputKind.CONSTANT_TENSOR: Slot.CONSTANT,
    InputKind.USER_INPUT: Slot.INPUT,
}


def assembled(
    program: ExportedProgram,
    entry: Entry,
    model: nn.Module,
    rules: RuleSet,
    low_dtype: torch.dtype,
    signature: tuple[Any, ...],
) -> TracedModel:
    """Build the traced model of an entry that was exported under a policy."""
    graph = flat_graph(program)
    changes = tuple(_lasting(entry.outputs.changes, program, graph))
    placeholders, tensors = _placeholders(program, graph, model, getattr(entry, ENTRY_NAME))
    return TracedModel(
        graph=graph,
        placeholders=placeholders,
        tensors=tensors,
        sites=build_sites(graph, placeholders),
        outputs=entry.outputs.names,
        structure=entry.outputs.structure,
        signature=signature,
        changes=changes,
        random_constants=entry.outputs.random_constants,
        policy=rules.name,
        dtype=low_dtype,
        notes=(
            *storage_notes(model, rules.file.weights, low_dtype),
            *_state_notes(changes, entry.outputs.random_constants),
        ),
        clip=rules.file.weights.clip,
        split_ties=split_ties(model, rules.file.weights, low_dtype),
    )


def _placeholders(
    program: ExportedProgram, graph: fx.Graph, model: nn.Module, fake_model: nn.Module
) -> tuple[tuple[Placeholder, ...], dict[str, torch.Tensor]]:
    real = {layer_path(name): tensor for name, tensor in named_tensors(model).items()}
    masters = constant_masters(model, fake_model)
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    slots: list[Placeholder] = []
    tensors: dict[str, torch.Tensor] = {}
    count = 0
    for node in graph.find_nodes(op="placeholder"):
        spec = specs[node.name]
        slot = _SLOTS[spec.kind]
        if slot is Slot.CONSTANT and not node.users:
            graph.erase_node(node)  # left of a composite op that was split (nn.LSTM), without values
            continue
        name = layer_path(str(spec.target)) if spec.target else f"input[{count}]"
        count += slot is Slot.INPUT
        if slot is not Slot.INPUT:
            constant = program.constants.get(str(spec.target))
            tensors[node.name] = real[name] if name in real else _real(masters.get(id(constant), constant))
        value = node.meta.get("val")
        slots.append(Placeholder(node.name, slot, name, getattr(value, "dtype", None)))
    return tuple(slots), tensors


def _lasting(
    changes: Sequence[StateChange], program: ExportedProgram, graph: fx.Graph
) -> Iterator[StateChange]:
    """Return changes that a later call may read, without tensors that each call recomputes."""
    used = {node.name for node in graph.find_nodes(op="placeholder") if node.users}
    specs = [spec for spec in program.graph_signature.input_specs if spec.arg.name in used]
    read = {id(program.constants.get(str(spec.target))) for spec in specs}
    for change in changes:
        if change.plain:
            yield change
        elif change.stale is None or any(id(tensor) in read for tensor in change.stale):
            yield StateChange(change.number, change.name, None, None, plain=False)


def _state_notes(changes: Sequence[StateChange], random_constants: bool) -> tuple[str, ...]:
    """Explain why the trace is valid for this call only."""
    plain = ", ".join(change.name for change in changes if change.plain)
    stored = ", ".join(change.name for change in changes if not change.plain)
    notes = [f"forward changes {plain}: traced again for each of its values"] if plain else []
    if random_constants:
        notes.append("forward draws Python's or NumPy's random numbers: each call is traced again")
    if stored:
        notes.append(f"forward stores tensors or objects in {stored}: each call is traced without them")
    return tuple(notes)


def _real(constant: Any) -> torch.Tensor:
    assert isinstance(constant, torch.Tensor), constant
    return constant
