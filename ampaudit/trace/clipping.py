"""What some converters do to weights before they round them."""

from __future__ import annotations

import torch

from ampaudit.policy.schema import Constants

__all__ = ["clipped"]


def clipped(values: torch.Tensor, limits: Constants) -> torch.Tensor:
    """Finite values moved into the limits, with their signs; 0, inf and NaN stay as they are."""
    magnitude = values.abs().clamp(limits.min_positive, limits.max_finite)
    moved = torch.copysign(magnitude, values)
    return torch.where(values.isfinite() & (values != 0), moved, values)
