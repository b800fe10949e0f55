"""Runs code without changing the user's model or the global random state."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.trace.structure import structural_copy

__all__ = ["call_unchanged", "host_state", "preserved", "seeded"]


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the state of each generator afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed each generator while active, and restore its state afterwards."""
    with preserved():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        yield


def host_state() -> tuple[Any, ...]:
    """Return the state of Python's and NumPy's generators, to detect whether a number was drawn."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), tuple(rest)


@torch.no_grad()
def call_unchanged(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, seed: int) -> Any:
    """Call a model without gradients, on a copy that shares its parameters, and on copies of its inputs.

    Inputs, buffers and Python attributes keep their values, whatever the model writes to them.

    Args:
        model: A module, or any callable like one.
        args: Positional inputs.
        kwargs: Keyword inputs.
        seed: Seeds the random numbers that the model draws.
    """
    if isinstance(model, nn.Module):
        shared = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
        model = structural_copy(model, shared)
    copies: dict[int, torch.Tensor] = {}  # a tensor that is given twice is one
    args, kwargs = pytree.tree_map_only(
        torch.Tensor, lambda given: copies.setdefault(id(given), given.detach().clone()), (args, dict(kwargs))
    )
    with seeded(seed):
        return model(*args, **kwargs)
