"""Follows the dtype of NumPy arrays that a model makes of 16-bit tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["HalfArray", "tensor_of"]


class HalfArray(np.ndarray[Any, Any]):
    """The FP32 values of an array that is float16 in the 16-bit run, as is what NumPy computes from it.

    Unless its code asks for another dtype, a tensor made of it is float16 as well.
    """

    def astype(self, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert to another dtype; to float16, the values stay those of FP32."""
        if np.dtype(dtype) == np.float16:
            return self.copy()
        return np.asarray(self).astype(dtype, *args, **kwargs)


def tensor_of(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a function that makes a tensor of an array: of a ``HalfArray``, it is cast to float16."""

    def make(data: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(data, HalfArray):
            return function(data, *args, **kwargs)
        made = function(np.asarray(data), *args, **kwargs)
        asked = args or kwargs.get("dtype") is not None
        return made.to(torch.float16) if made.dtype is torch.float32 and not asked else made

    return make
