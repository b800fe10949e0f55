"""Moves what is alive between two segments: to the host and back, or into bytes and back."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

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
    *(ValueError, KeyError, TypeError, AttributeError, IndexError),
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
    if not _is_view_of_bytes(tensor):
        return tensor.to(device)
    storage = tensor.untyped_storage()
    if storage._cdata not in moved:
        moved[storage._cdata] = storage, _bytes_of(storage).to(device).untyped_storage()
    return _View.of(tensor, 0).on(moved[storage._cdata][1])


def _is_view_of_bytes(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _View(NamedTuple):
    """How a tensor reads a storage, the ``storage``-th of several; dtypes of one storage may differ."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int) -> _View:
        shape, strides = tuple(tensor.shape), tensor.stride()
        flags = (tensor.is_conj(), tensor.is_neg())
        return cls(storage, tensor.dtype, int(tensor.storage_offset()), shape, strides, *flags)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor.

        Raises:
            ValueError: it would read beyond the storage.
        """
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        ends = (last + 1) * self.dtype.itemsize if 0 not in self.shape else 0
        if min(self.offset, *self.shape, *self.strides, 0) < 0 or ends > storage.nbytes():
            raise ValueError("a tensor beyond its memory")
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        made = made.set_(storage, self.offset, self.shape, self.strides)
        made = made.conj() if self.is_conj else made
        return torch.ops.aten._neg_view(made) if self.is_neg else made


def pack_state(state: GraphState, more: State) -> bytes:
    """Return a state as bytes, with more plain data; values that share memory still do afterwards."""
    storages: dict[int, tuple[int, torch.Tensor]] = {}
    made: dict[int, tuple[str, tuple[Any, ...]]] = {}  # one tensor in two places stays one

    def change(tensor: torch.Tensor) -> torch.Tensor | tuple[str, tuple[Any, ...]]:
        if not _is_view_of_bytes(tensor):
            return tensor
        storage = tensor.untyped_storage()
        index, _ = storages.setdefault(storage._cdata, (len(storages), _bytes_of(storage)))
        return made.setdefault(id(tensor), (_VIEW, tuple(_View.of(tensor, index))))

    tables = [
        {node.name: pytree.tree_map_only(torch.Tensor, change, pair) for node, pair in table.items()}
        for table in (state.values, state.buffers)
    ]
    contents = [content for _, content in storages.values()]
    file = io.BytesIO()
    torch.save({"storages": contents, "tables": tables, "group": state.group, "more": more}, file)
    return file.getvalue()


_VIEW = "view of a storage"


def unpack_state(data: bytes, program: Program, device: torch.device, name: str) -> tuple[GraphState, State]:
    """Return a state from bytes, and what was put with it; nothing in the bytes is ever run.

    Raises:
        InputError: they are no state of this program; errors call them ``name``.
    """
    nodes: dict[str, fx.Node] = {node.name: node for node in program.traced.graph.nodes}
    try:
        found = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
        made: dict[int, torch.Tensor] = {}
        storages = [content.untyped_storage() for content in found["storages"]]
        values, buffers = (
            {nodes[key]: tuple(_unpacked(pair, storages, made)) for key, pair in table.items()}
            for table in found["tables"]
        )
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


def _unpacked(value: Any, storages: Sequence[torch.UntypedStorage], made: dict[int, torch.Tensor]) -> Any:
    """Return a value with its tensors in the place of how they read the storages."""
    if isinstance(value, tuple) and len(value) == 2 and value[0] == _VIEW:
        if id(value) not in made:
            view = _View(*value[1])
            made[id(value)] = view.on(storages[view.storage])
        return made[id(value)]
    if isinstance(value, dict):
        return {key: _unpacked(item, storages, made) for key, item in value.items()}
    return (
        type(value)(_unpacked(item, storages, made) for item in value)
        if isinstance(value, list | tuple)
        else value
    )
