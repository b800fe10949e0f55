"""Calls the user's own model, and leaves it and the random state as they were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ampaudit.trace.random_state import seeded
from ampaudit.trace.structure import structural_copy

__all__ = ["call_unchanged"]


@torch.no_grad()
def call_unchanged(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, seed: int) -> Any:
    """The model's output, without gradients.

    What runs is a copy that shares the parameters' memory: buffers and Python attributes that the model's
    code writes are its own.

    Args:
        model: a module, or anything that is called like one.
        args: positional inputs.
        kwargs: keyword inputs.
        seed: of the random numbers that it draws.
    """
    if isinstance(model, nn.Module):
        shared = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
        model = structural_copy(model, shared)
    with seeded(seed):
        return model(*args, **kwargs)
