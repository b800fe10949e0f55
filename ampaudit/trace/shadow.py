"""A copy of the model that has every module and attribute but no weights: parameters are fake tensors.

Tracing on the shadow leaves the user's model untouched, costs no memory for weights, and lets the
parameters have the dtype in which the policy stores them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampaudit.errors import TraceFailed
from ampaudit.trace.opnames import CASTABLE

__all__ = ["fake_like", "kept_in_fp32", "named_tensors", "shadow_of"]


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by every name it has, tied ones under each name."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    return tensors


def kept_in_fp32(model: nn.Module) -> tuple[str, ...]:
    """Module names that the author asks to keep in FP32 (Transformers' ``_keep_in_fp32_modules``)."""
    names: set[str] = set()
    for module in model.modules():
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            listed = getattr(module, attribute, None)
            if isinstance(listed, Iterable):
                names.update(str(name) for name in listed)
    return tuple(sorted(names))


def shadow_of(
    model: nn.Module, mode: FakeTensorMode, storage: torch.dtype | None, keep: tuple[str, ...]
) -> nn.Module:
    """The shadow, with floating-point parameters and buffers in ``storage`` (``None``: as they are).

    Args:
        model: the user's model; not changed.
        mode: the fake mode that the trace will use.
        storage: dtype of the stored weights; float64 and integers stay.
        keep: module names (as path components) whose tensors stay in float32.

    Raises:
        TraceFailed: some attribute of the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for name, tensor in named_tensors(model).items():
        if id(tensor) in memo:
            continue
        dtype = storage if storage is not None and tensor.dtype in CASTABLE else tensor.dtype
        if any(fnmatchcase(part, pattern) for part in name.split(".") for pattern in keep):
            dtype = tensor.dtype
        fake = fake_like(tensor, mode, dtype)
        memo[id(tensor)] = nn.Parameter(fake, False) if isinstance(tensor, nn.Parameter) else fake
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    try:
        shadow = copy.deepcopy(model, memo)
    except Exception as error:
        raise TraceFailed(
            f"{type(model).__name__} cannot be copied for tracing: {type(error).__name__}: {error}",
            hint="remove open files, locks, generators and handles from the module's attributes",
        ) from error
    _without_cache(shadow)
    return shadow


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor with the shape, strides and device of a real one."""
    with mode:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device, requires_grad=False
        )


def _without_cache(shadow: nn.Module) -> None:
    """Generation caches change no value of one forward pass, and their types cannot be exported."""
    for module in shadow.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
