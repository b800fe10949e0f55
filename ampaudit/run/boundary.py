"""Moves what is alive between two segments: to the host and back, or into bytes and back."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampaudit.core.errors import InputError, first_line
from ampaudit.run.lockstep import GraphState
from ampaudit.run.program import Program

__all__ = ["moved_to", "pack_state", "unpack_state"]

State = dict[str, Any]
_MISFITS = (
    *(pickle.UnpicklingError, EOFError, RuntimeError),
    *(ValueError, KeyError, TypeError, AttributeError),
)


def moved_to(state: GraphState, device: torch.device) -> None:
    """Move values to a device, with their strides; those that share memory still do afterwards."""
    moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor, _moved(tensor, device, moved)
        return made[id(tensor)][1]

    for table in (state.values, state.buffers):
        for node, pair in table.items():
            table[node] = pytree.tree_map_only(torch.Tensor, change, pair)


def _moved(
    tensor: torch.Tensor,
    device: torch.device,
    moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]],
) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        return tensor.to(device)
    storage = tensor.untyped_storage()
    if storage._cdata not in moved:
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        moved[storage._cdata] = storage, flat.to(device).untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype, device=device)
    return made.set_(moved[storage._cdata][1], tensor.storage_offset(), tensor.shape, tensor.stride())


def pack_state(state: GraphState, more: State) -> bytes:
    """Return a state as bytes, with more plain data; values that share memory still do afterwards."""
    values = {node.name: pair for node, pair in state.values.items()}
    buffers = {node.name: pair for node, pair in state.buffers.items()}
    file = io.BytesIO()
    torch.save({"values": values, "buffers": buffers, "group": state.group, "more": more}, file)
    return file.getvalue()


def unpack_state(data: bytes, program: Program, device: torch.device, name: str) -> tuple[GraphState, State]:
    """Return a state from bytes, and what was put with it; nothing in the bytes is ever run.

    Raises:
        InputError: they are no state of this program; errors call them ``name``.
    """
    nodes: dict[str, fx.Node] = {node.name: node for node in program.traced.graph.nodes}
    try:
        found = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
        values = {nodes[key]: tuple(pair) for key, pair in found["values"].items()}
        buffers = {nodes[key]: tuple(pair) for key, pair in found["buffers"].items()}
        group, more = found["group"], found["more"]
        if not (isinstance(group, int) and 0 <= group <= len(program.groups) and isinstance(more, dict)):
            raise ValueError("another program's")
        if any(len(pair) != 2 for pair in (*values.values(), *buffers.values())):
            raise ValueError("not pairs")
    except _MISFITS as error:
        raise InputError(
            f"{name} is not a state of this audit: {first_line(error)}", hint="remove it, and start again"
        ) from None
    return GraphState(values, buffers, group), more
