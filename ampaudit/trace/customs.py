"""Notices, while a model is traced, code whose way back is its own: no graph of the forward pass has it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint

__all__ = ["CHECKPOINT", "custom_backwards"]

CHECKPOINT = "checkpoint"


@contextmanager
def custom_backwards() -> Iterator[list[str]]:
    """Names of custom autograd functions that are called, and ``checkpoint`` for recomputed activations."""
    found: list[str] = []
    function: Any = torch.autograd.Function
    original, generator = (
        function.__dict__["apply"],
        torch.utils.checkpoint._checkpoint_without_reentrant_generator,
    )

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(CHECKPOINT if cls is torch.utils.checkpoint.CheckpointFunction else cls.__name__)
        return original.__get__(None, cls)(*args, **kwargs)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        found.append(CHECKPOINT)
        return generator(*args, **kwargs)

    function.apply = classmethod(apply)
    torch.utils.checkpoint._checkpoint_without_reentrant_generator = recomputed
    try:
        yield found
    finally:
        function.apply = original
        torch.utils.checkpoint._checkpoint_without_reentrant_generator = generator
