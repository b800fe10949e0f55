"""The global random numbers of Python, NumPy and torch: seeded for a while, and put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["host_state", "preserved", "seeded"]


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
