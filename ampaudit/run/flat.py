"""Views pairs of tensors as vectors, in memory order where that is possible."""

from __future__ import annotations

import torch

__all__ = ["flat_pair", "sample"]

SAMPLE_RUNS = 8
SAMPLE_RUN_LENGTH = 64


def flat_pair(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tensors as vectors whose elements correspond; without a copy where both are dense alike."""
    if first is second:
        vector = _flat(first) if _dense(first) else first.reshape(-1)
        return vector, vector
    if first.stride() == second.stride() and _dense(first) and _dense(second):
        return _flat(first), _flat(second)
    return first.reshape(-1), second.reshape(-1)


def sample(vector: torch.Tensor) -> torch.Tensor:
    """All of a short vector; else 8 evenly spaced runs of 64 elements (a view, so a cheap copy)."""
    total = SAMPLE_RUNS * SAMPLE_RUN_LENGTH
    if vector.numel() <= total:
        return vector
    step = (vector.numel() - SAMPLE_RUN_LENGTH) // (SAMPLE_RUNS - 1)
    stride = vector.stride(0)
    return vector.as_strided(
        (SAMPLE_RUNS, SAMPLE_RUN_LENGTH), (step * stride, stride), vector.storage_offset()
    ).reshape(-1)


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in any order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
