"""Attributes of tensors that reach around a trace: ``data``, whose memory no op shows, and ``grad_fn``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction

from ampaudit.trace.stack import is_tool_file

__all__ = ["tensor_attributes"]


def tensor_attributes(hooked: Callable[[], None]) -> Iterator[tuple[Any, str, Any]]:
    """What to replace while a model is traced: the owner, the name, and what by.

    Args:
        hooked: called where the model's code registers a hook on a node of autograd's.
    """
    tensor: Any = torch.Tensor
    data, grad_fn = tensor.data, tensor.grad_fn

    def get_data(value: torch.Tensor) -> Any:
        return value.detach() if isinstance(value, FakeTensor) else data.__get__(value)

    def set_data(value: torch.Tensor, other: torch.Tensor) -> None:
        alike = isinstance(value, FakeTensor) and isinstance(other, FakeTensor)
        if alike and value.shape == other.shape and value.dtype == other.dtype:
            with torch.no_grad():
                value.copy_(other)
        else:
            data.__set__(value, other)

    def get_grad_fn(value: torch.Tensor) -> Any:
        node = grad_fn.__get__(value)
        own = is_tool_file(sys._getframe(1).f_code.co_filename)
        return node if node is None or own else _Node(node, hooked)

    yield tensor, "data", property(get_data, set_data)
    yield tensor, "grad_fn", property(get_grad_fn)


class _Node:
    """A node of autograd's graph that tells when it gets a hook; those of custom functions tell it anyway."""

    def __init__(self, node: Any, hooked: Callable[[], None]) -> None:
        self._node = node
        self._hooked = hooked

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook") and not isinstance(self._node, BackwardCFunction):
            self._hooked()
        return getattr(self._node, name)
