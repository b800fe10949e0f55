"""Runs code without changing the user's model or the global random state."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ampaudit.trace.structure import structural_copy

__all__ = ["call_unchanged", "host_state", "preserved", "seeded"]


@contextmanager
def preserved() -> Iterator[None]:
    """Afterwards each generator goes on where it was."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """While active, draw the numbers of a seed; afterwards each generator goes on where it was."""
    with preserved():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        yield


def host_state() -> tuple[Any, ...]:
    """State of the generators whose numbers a trace takes for constants: equal if none was drawn."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), tuple(rest)


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
