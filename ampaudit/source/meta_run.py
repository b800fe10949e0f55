"""Runs a model without its weights: only what follows from the inputs and from constants has values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampaudit.trace.opnames import written_values
from ampaudit.trace.structure import structural_copy

__all__ = ["MetaRun", "ValuesNeeded", "meta_copy"]

_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_aten = torch.ops.aten


class ValuesNeeded(Exception):
    """Code depends on values that follow from weights."""


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters and buffers are on the ``meta`` device."""
    replace: dict[int, Tensor] = {id(b): b.to("meta") for b in model.buffers()}
    for parameter in model.parameters():
        replace[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    return structural_copy(model, replace).eval()


class MetaRun(TorchDispatchMode):
    """Computes on the CPU what follows from CPU tensors, and shapes where a tensor on ``meta`` takes part.

    So code that reads the number of an image's patches, the places of its tokens, or a mask, runs.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not any(tensor.is_meta for tensor in tensors):
            if kwargs.get("device") == torch.device("meta") and func is not _aten.empty.memory_format:
                kwargs = kwargs | {"device": "cpu"}
            return func(*args, **kwargs)
        dynamic = any(tag in func.tags for tag in _VALUES)
        if func is _aten.index.Tensor:
            indices = [part for index in args[1] for part in _numbers(index)]
            args = (args[0], indices)
            dynamic = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
        written = written_values(func, args, kwargs)
        if dynamic or any(isinstance(value, Tensor) and not value.is_meta for value in written):
            raise ValuesNeeded(str(func))
        if func is _aten.embedding.default and not args[1].is_meta:
            _check_rows(*args[:2])
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def _numbers(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return a known mask as indices along each of its axes, and another index as it is."""
    if index is None or index.is_meta or index.dtype not in (torch.bool, torch.uint8):
        return (index,)
    return index.nonzero().unbind(1)


def _check_rows(table: Tensor, rows: Tensor) -> None:
    """Reject a row that a table lacks, as the kernel with weights does."""
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(table):
        raise IndexError(f"row {int(rows.max())} of an embedding with {len(table)}")
