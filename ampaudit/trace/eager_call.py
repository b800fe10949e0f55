"""Calls the user's own model in FP32 on a copy, to learn whether it runs without torch.export."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.trace.entry import tensor_leaves
from ampaudit.trace.fake_model import named_tensors, without_cache
from ampaudit.trace.holders import restored
from ampaudit.trace.internals import FakeTensor
from ampaudit.trace.isolation import seeded
from ampaudit.trace.structure import structural_copy
from ampaudit.trace.twin_check import twins_checked
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["EagerCall", "attempt_in_fp32", "fp32_copy", "without_low_precision", "writable"]


@dataclass(frozen=True, slots=True)
class EagerCall:
    """The outcome of an eager call; ``error`` is ``None`` if the model ran or was not called."""

    ran: bool
    error: BaseException | None = None


def attempt_in_fp32(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> EagerCall:
    """Call a copy of the model, and report an error only if every kind of call fails.

    The calls are in FP32 without and with gradients, and in the stored dtypes if some weights have 16 bits. A
    model without values is not called, nor is one that may not fit into memory twice.
    """
    tensors = [*named_tensors(model).values(), *tensor_leaves(args, kwargs)]
    if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
        return EagerCall(ran=False)
    low_precision = [tensor for tensor in tensors if tensor.dtype in LOW_PRECISION_DTYPES]
    if sum(4 * tensor.numel() for tensor in low_precision) > psutil.virtual_memory().available // 2:
        return EagerCall(ran=False)
    first: BaseException | None = None
    for wide, grad in ((True, False), (True, True), *([(False, False)] if low_precision else [])):
        try:
            copied, new_args, new_kwargs = _copied(model, args, kwargs, wide=wide)
        except Exception:
            return EagerCall(ran=False)  # a failed copy says nothing about the model
        try:
            with seeded(0), torch.set_grad_enabled(grad), _silent(), twins_checked():
                copied(*restored(new_args), **restored(new_kwargs))
        except (Exception, SystemExit) as error:
            first = first or error
        else:
            return EagerCall(ran=True)
    return EagerCall(ran=False, error=first)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Drop prints and warnings, which the model's code has issued while it was traced."""
    nowhere = io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        warnings.simplefilter("ignore")
        yield


def _copied(model: nn.Module, args: Any, kwargs: Any, *, wide: bool) -> tuple[nn.Module, Any, Any]:
    """Copy a model and its inputs, in FP32 or as they are."""

    def clone(tensor: torch.Tensor) -> torch.Tensor:
        return writable(tensor, None) if wide else tensor.clone()

    new_args, new_kwargs = pytree.tree_map_only(torch.Tensor, clone, (args, kwargs))
    if wide:
        return fp32_copy(model, None), new_args, new_kwargs
    return structural_copy(model, {id(p): p for p in model.parameters()}), new_args, new_kwargs


def fp32_copy(model: nn.Module, device: torch.device | None) -> nn.Module:
    """Copy a model for one call in FP32 on a device, sharing the weights that are FP32 there already.

    ``None`` leaves each tensor where it is.
    """
    tensors: dict[int, torch.Tensor] = {}
    for tensor in named_tensors(model).values():
        if isinstance(tensor, nn.Parameter):
            wide = without_low_precision(tensor, device)
            tensors[id(tensor)] = nn.Parameter(wide, tensor.requires_grad and wide.is_floating_point())
        else:
            tensors[id(tensor)] = writable(tensor, device)
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor):
                tensors.setdefault(id(value), writable(value, device))
    clone = structural_copy(model, tensors)
    without_cache(clone)
    return clone


def without_low_precision(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Return the tensor on the device, in float32 if it has 16 bits; without a copy if possible."""
    value = tensor.detach().to(device or tensor.device)
    return value.float() if value.dtype in LOW_PRECISION_DTYPES else value


def writable(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Like ``without_low_precision``, but in memory that the model may write to."""
    wide = without_low_precision(tensor, device)
    return wide.clone() if wide.data_ptr() == tensor.data_ptr() else wide
