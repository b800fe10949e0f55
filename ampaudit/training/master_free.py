"""Trains without FP32 masters: parameters and optimizer state are 16-bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ampaudit.run.backends import rounded
from ampaudit.trace.fake_model import named_tensors

__all__ = ["cast_parameters", "round_parameters"]


def cast_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, torch.dtype]
) -> None:
    """Cast parameters and buffers to 16 bits in place, so that the optimizer keeps them."""
    for name, tensor in named_tensors(model).items():
        if name in stored:
            tensor.data = tensor.data.to(stored[name])
    optimizer.load_state_dict(optimizer.state_dict())  # casts what state there is


def round_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, torch.dtype]
) -> None:
    """Emulate the same: round parameters and optimizer state after each step, and eps during it."""
    tensors = named_tensors(model)
    low_precision = {id(tensors[name]): (tensors[name], dtype) for name, dtype in stored.items()}

    @torch.no_grad()
    def round_all(*_: Any) -> None:
        for tensor, dtype in low_precision.values():
            tensor.copy_(rounded(tensor, dtype))
            for value in optimizer.state.get(tensor, {}).values():
                # a step count is a tensor without dimensions, and stays exact
                if isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point():
                    value.copy_(rounded(value, dtype))

    def round_eps(*_: Any) -> None:
        for group in optimizer.param_groups:
            if "eps" in group:
                kept.append(group["eps"])
                group["eps"] = float(torch.tensor(group["eps"]).to(low_dtype))

    def restore_eps(*_: Any) -> None:
        for group in optimizer.param_groups:
            if "eps" in group:
                group["eps"] = kept.pop(0)

    round_all()
    if not low_precision:
        return
    low_dtype = next(iter(low_precision.values()))[1]
    kept: list[float] = []
    optimizer.register_step_pre_hook(round_eps)
    optimizer.register_step_post_hook(restore_eps)
    optimizer.register_step_post_hook(round_all)
