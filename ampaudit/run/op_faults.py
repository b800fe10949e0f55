"""Watches the ops of a function that runs eagerly, to find the line at which 16 bits leave the range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampaudit.core.sites import SourceLine
from ampaudit.trace.stack import calling_line
from ampaudit.trace.values import inexact

__all__ = ["OpWatch", "first_fault"]

OpSeen = tuple[str, bool, SourceLine | None]  # its name, whether its result is finite, its line if it is not


class OpWatch(TorchDispatchMode):
    """Notes of each op whether its result is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[OpSeen] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the op, and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        finite = all(bool(t.isfinite().all()) for t in tensors if inexact(t))
        self.ops.append((str(func).removesuffix(".default"), finite, None if finite else calling_line()))
        return result


def first_fault(reference: Sequence[OpSeen], own: Sequence[OpSeen]) -> tuple[str, SourceLine | None]:
    """Return name and line of the first op that is finite in FP32 only; no name if the ops differ before."""
    for (name, finite, _), (own_name, own_finite, line) in zip(reference, own, strict=False):
        if name != own_name:
            break
        if finite and not own_finite:
            return name, line
    return "", None
