"""Calls the user's own model, and leaves it and the random state as they were."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["call_unchanged"]


@torch.no_grad()
def call_unchanged(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, seed: int) -> Any:
    """The model's output, without gradients; its buffers, which training mode moves, are put back.

    Args:
        model: a module, or anything that is called like one.
        args: positional inputs.
        kwargs: keyword inputs.
        seed: of the random numbers that it draws.
    """
    buffers = list(model.buffers()) if isinstance(model, nn.Module) and model.training else []
    before = [buffer.clone() for buffer in buffers]
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return model(*args, **kwargs)
    finally:
        for buffer, old in zip(buffers, before, strict=True):
            buffer.copy_(old)
