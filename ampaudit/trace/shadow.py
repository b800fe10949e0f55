"""A copy of the model that has every module and attribute but no weights: parameters are fake tensors.

Tracing on the shadow leaves the user's model untouched, costs no memory for weights, and lets the
parameters have the dtype in which the policy stores them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ampaudit.trace.structure import structural_copy

__all__ = ["fake_like", "named_tensors", "shadow_of", "without_cache"]


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by every name it has, tied ones under each name."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    return tensors


def shadow_of(model: nn.Module, mode: FakeTensorMode, dtypes: Mapping[str, torch.dtype]) -> nn.Module:
    """The shadow, with parameters and buffers as fake tensors.

    Args:
        model: the user's model; not changed.
        mode: the fake mode that the trace will use.
        dtypes: of stored parameters and buffers by name; the others stay as they are.
    """
    fakes: dict[int, torch.Tensor] = {}
    for name, tensor in named_tensors(model).items():
        if id(tensor) not in fakes:
            fake = fake_like(tensor, mode, dtypes.get(name, tensor.dtype))
            fakes[id(tensor)] = nn.Parameter(fake, False) if isinstance(tensor, nn.Parameter) else fake
    shadow = structural_copy(model, fakes)
    without_cache(shadow)
    return shadow


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor with the shape, strides and device of a real one."""
    with mode:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device, requires_grad=False
        )


def without_cache(shadow: nn.Module) -> None:
    """Generation caches change no value of one forward pass, and their types cannot be exported."""
    for module in shadow.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
