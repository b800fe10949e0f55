"""A module that stands before another and has its parameters, buffers and submodules, by their names."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["ModelProxy", "in_float32"]


class ModelProxy(nn.Module):
    """Computes what a model computes, in another way; an optimizer, a checkpoint and DDP see the model's own.

    Args:
        model: the user's; called by its own name it computes as before.
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
        """What the model returns."""
        if self._ampaudit_plain:
            return self.original(*args, **kwargs)
        return self.mixed(*args, **kwargs)

    @abstractmethod
    def mixed(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, computed in mixed precision."""

    @contextmanager
    def float32(self) -> Iterator[nn.Module]:
        """While active, calls run the model as it is, in FP32, with the masters."""
        before, self._ampaudit_plain = self._ampaudit_plain, True
        try:
            yield self
        finally:
            self._ampaudit_plain = before


def in_float32(output: Any) -> Any:
    """The output with its 16-bit tensors as float32: a loss outside is then computed in float32."""

    def wide(value: torch.Tensor) -> torch.Tensor:
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value

    return pytree.tree_map_only(torch.Tensor, wide, output)
