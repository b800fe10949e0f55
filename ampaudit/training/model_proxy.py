"""Wrappers that compute a model in another way, over its own parameters and submodules."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["AutocastModule", "ModelProxy", "in_float32"]


class ModelProxy(nn.Module):
    """Wraps a model; optimizers, checkpoints and DDP see the model's own tensors.

    Args:
        model: the user's; called itself, it computes as before.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        hidden = self.__dict__
        hidden["_ampaudit_model"] = model
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            hidden[table] = model.__dict__[table]
        self.training = model.training
        self._ampaudit_plain = False

    @property
    def original(self) -> nn.Module:
        """The user's model, with the same parameters."""
        model: nn.Module = self.__dict__["_ampaudit_model"]
        return model

    def train(self, mode: bool = True) -> ModelProxy:
        """Set the mode of this module and of the model."""
        self.original.train(mode)
        self.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        if self._ampaudit_plain:
            return self.original(*args, **kwargs)
        return self.mixed(*args, **kwargs)

    @property
    @abstractmethod
    def low_dtype(self) -> torch.dtype:
        """The 16-bit format of the mixed precision."""

    @abstractmethod
    def mixed(self, *args: Any, **kwargs: Any) -> Any:
        """Compute in mixed precision."""

    @contextmanager
    def float32(self) -> Iterator[nn.Module]:
        """Call the model in FP32 with its masters while active."""
        before, self._ampaudit_plain = self._ampaudit_plain, True
        try:
            yield self
        finally:
            self._ampaudit_plain = before


class AutocastModule(ModelProxy):
    """Runs the model's own code under autocast, if no graph can contain it; outputs are float32.

    Args:
        model: the user's.
        device: device type of the autocast.
        dtype: its 16-bit format.
    """

    def __init__(self, model: nn.Module, device: str, dtype: torch.dtype) -> None:
        super().__init__(model)
        self._ampaudit_autocast = device, dtype

    @property
    def low_dtype(self) -> torch.dtype:
        """The format of autocast."""
        return self._ampaudit_autocast[1]

    def mixed(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own code under autocast."""
        device, dtype = self._ampaudit_autocast
        with torch.autocast(device, dtype=dtype):
            return in_float32(self.original(*args, **kwargs))


def in_float32(output: Any) -> Any:
    """Convert 16-bit outputs to float32, so that an outside loss is computed in float32."""

    def wide(value: torch.Tensor) -> torch.Tensor:
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value

    return pytree.tree_map_only(torch.Tensor, wide, output)
