"""Which ops another one calls, found by calling it on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ampaudit.policy.aten_ops import inner_op
from ampaudit.trace.opnames import composite_kernel, is_composite, is_view, op_name

__all__ = ["InnerOps", "on_meta"]


# what autocast casts inside the kernels of other ops
_PRODUCTS = frozenset({"addmm", "baddbmm", "bmm", "linear", "matmul", "mm"})


class InnerOps:
    """Remembers what ops call: a model calls few ops in few ways."""

    def __init__(self) -> None:
        self._found: dict[tuple[OpOverload, str], frozenset[str]] = {}

    def mentioned(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], names: frozenset[str]
    ) -> bool:
        """Whether an op that stays whole otherwise calls one of these ops.

        A kernel that is no composite of autograd's may ask for memory that a trace has not: of what it
        calls, products alone count.
        """
        if torch.Tag.nondeterministic_seeded in op.tags:  # a call would draw from the user's generator
            return False
        if composite_kernel(op) is None or is_view(op) or inner_op(op_name(op)) is not None:
            return False
        key = (op, repr(pytree.tree_map_only(torch.Tensor, lambda t: t.ndim, (args, kwargs))))
        if key not in self._found:
            self._found[key] = _inner_ops(op, args, kwargs)
        return bool(self._found[key] & (names if is_composite(op) else names & _PRODUCTS))


def _inner_ops(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
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
