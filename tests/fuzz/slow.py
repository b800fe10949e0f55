"""Leaves what imports Transformers in a process of its own, for seconds each, to the slow tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["slow_directories"]


def slow_directories(names: Iterable[str]) -> list[Any]:
    """Return the names as parameters, those of model directories marked as slow."""
    return [
        pytest.param(name, marks=pytest.mark.slow) if name.startswith("huggingface") else name
        for name in names
    ]
