"""Which ops another one calls, found by calling it on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ampaudit.trace.opnames import composite_kernel, op_name

__all__ = ["inner_ops", "on_meta"]


def inner_ops(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
    """Policy names of what a composite op calls; up to where it asks for values, which fake tensors lack."""
    kernel = composite_kernel(op)
    seen = _Names()
    if kernel is None:
        return frozenset()
    with _disable_current_modes(), torch.no_grad(), torch._C._DisableAutocast(), seen:
        try:
            given = pytree.tree_map_only(torch.Tensor, on_meta, (args, kwargs))
            kernel(*given[0], **given[1])
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            pass
    return frozenset(seen.found)


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like another one, without memory."""
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note one inner op."""
        del types
        self.found.add(op_name(func))
        return func(*args, **(kwargs or {}))
