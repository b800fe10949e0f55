"""A model whose own code runs under ``torch.autocast``: for what no graph can hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ampaudit.training.sharing import ModelProxy, in_float32

__all__ = ["AutocastModule"]


class AutocastModule(ModelProxy):
    """Calls the model under autocast; outputs are float32.

    Args:
        model: the user's.
        device: device type of the autocast.
        dtype: its 16-bit format.
    """

    def __init__(self, model: nn.Module, device: str, dtype: torch.dtype) -> None:
        super().__init__(model)
        self._ampaudit_autocast = device, dtype

    def mixed(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own code, under autocast."""
        device, dtype = self._ampaudit_autocast
        with torch.autocast(device, dtype=dtype):
            return in_float32(self.original(*args, **kwargs))
