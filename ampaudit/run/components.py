"""Views complex numbers as two real components, each measured, rounded and repaired by itself."""

from __future__ import annotations

import torch

__all__ = ["as_complex", "components", "rounded_components"]


def components(tensor: torch.Tensor) -> torch.Tensor:
    """Real and imaginary parts along a new last dimension; a real tensor as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_complex(parts: torch.Tensor) -> torch.Tensor:
    """The complex numbers whose ``components`` are given."""
    return torch.view_as_complex(parts.contiguous())


def rounded_components(tensor: torch.Tensor, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """A tensor in float32 or complex64 whose real numbers, or components, are rounded to a 16-bit format.

    Torch warns of every tensor of complex32 that is made, so none is.
    """
    if tensor.is_complex():
        return as_complex(components(tensor).to(dtype).float())
    return tensor.to(dtype).float()
