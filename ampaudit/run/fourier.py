"""Fourier transforms in float16 as CUDA computes them: what cuFFT gives is float16 before it is scaled.

The zero frequency is the sum of all elements; a scale of 1/n comes after it, when it may be infinite.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampaudit.run.components import rounded_components
from ampaudit.trace.fourier import TRANSFORMS, signal_sizes
from ampaudit.trace.opnames import base_name

__all__ = ["half_fourier"]


def half_fourier(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The transform of real numbers, or complex ones of two, in float16: in float32 or complex64."""
    wide = pytree.tree_map_only(torch.Tensor, lambda t: t if t.is_complex() else t.float(), (args, kwargs))
    with _Rounded():
        result = op(*wide[0], **wide[1])
    return rounded_components(result)


class _Rounded(TorchDispatchMode):
    """Rounds the result of every transform, and again after it was scaled."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One inner op."""
        del types
        if base_name(func) not in TRANSFORMS:
            return func(*args, **(kwargs or {}))
        values, dims, normalization, *rest = args
        raw = rounded_components(func(values, dims, 0, *rest))
        size = math.prod(signal_sizes(func, args, {}))
        scale = (1.0, 1 / math.sqrt(size), 1 / size)[normalization]
        return raw if scale == 1 else rounded_components(raw * scale)
