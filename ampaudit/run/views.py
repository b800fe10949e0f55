"""Views tensors as vectors in memory order, and complex numbers as pairs of real components."""

from __future__ import annotations

import torch

__all__ = ["as_complex", "components", "flat_pair", "rounded_components", "sample", "wrong_elements"]

SAMPLE_RUNS = 8
SAMPLE_RUN_LENGTH = 64


def flat_pair(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors as corresponding vectors, without copying those of the same dense layout."""
    if first is second:
        vector = _flat(first) if _dense(first) else first.reshape(-1)
        return vector, vector
    if first.stride() == second.stride() and _dense(first) and _dense(second):
        return _flat(first), _flat(second)
    return first.reshape(-1), second.reshape(-1)


def sample(vector: torch.Tensor) -> torch.Tensor:
    """Return all of a short vector, or 8 evenly spaced runs of 64 elements (a view, so a cheap copy)."""
    total = SAMPLE_RUNS * SAMPLE_RUN_LENGTH
    if vector.numel() <= total:
        return vector
    step = (vector.numel() - SAMPLE_RUN_LENGTH) // (SAMPLE_RUNS - 1)
    stride = vector.stride(0)
    return vector.as_strided(
        (SAMPLE_RUNS, SAMPLE_RUN_LENGTH), (step * stride, stride), vector.storage_offset()
    ).reshape(-1)


def _dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlaps, in any order."""
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


def wrong_elements(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """Return a mask of the elements that are finite in the reference only; ``None`` if there are none."""
    if value is reference or value.shape != reference.shape:
        return None
    mask = reference.isfinite() & ~value.isfinite()
    return mask if bool(mask.any()) else None


def components(tensor: torch.Tensor) -> torch.Tensor:
    """Return real and imaginary parts along a new last dimension; a real tensor unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_complex(parts: torch.Tensor) -> torch.Tensor:
    """Return the complex tensor with these ``components``."""
    return torch.view_as_complex(parts.contiguous())


def rounded_components(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float32 or complex64 with its components rounded to float16.

    Avoids complex32, whose tensors make torch warn.
    """
    if tensor.is_complex():
        return as_complex(components(tensor).to(torch.float16).float())
    return tensor.to(torch.float16).float()
