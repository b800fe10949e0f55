"""Shows the policy's autocast state to the model's code, without autocast taking effect.

Models call ``torch.is_autocast_enabled()`` and disable regions with ``torch.autocast(enabled=False)``.
Both must behave as they would on the target device, also on a machine without CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

import torch
from torch.cuda.amp import common
from torch.nn.modules.rnn import RNNBase

from ampaudit.trace.internals import Replacement, patched

__all__ = [
    "Region",
    "RegionKind",
    "autocast_visible",
    "current_region",
    "mixed_recurrent_inputs",
    "region_switched_on",
]

_DEVICES = ("cpu", "cuda")
# torch's own functions, also while those that the model's code calls are replaced
_enabled, _dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
# autocast for CUDA can be switched on, and in bfloat16, also on a machine without CUDA
_AVAILABLE = (
    Replacement(common, "amp_definitely_not_available", lambda: False),
    Replacement(torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True),
)


class RegionKind(StrEnum):
    """Whose autocast setting applies to the traced code."""

    POLICY = "policy"  # the policy decides
    DISABLED = "disabled"  # inside the author's autocast(enabled=False)
    OWN = "own"  # inside the author's autocast(enabled=True, dtype=...)


@dataclass(frozen=True, slots=True)
class Region:
    """The innermost autocast region of the model's code around an op."""

    kind: RegionKind
    dtype: torch.dtype | None = None


@contextmanager
def autocast_visible(enabled: bool, dtype: torch.dtype) -> Iterator[None]:
    """Set the autocast flags that Python code can read while active, for every device type."""
    before = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES]
    cache = torch.is_autocast_cache_enabled()
    try:
        for device in _DEVICES:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(False)
        with patched(_AVAILABLE):
            yield
    finally:
        for device, was_enabled, was_dtype in before:
            torch.set_autocast_enabled(device, was_enabled)
            torch.set_autocast_dtype(device, was_dtype)
        torch.set_autocast_cache_enabled(cache)


@contextmanager
def mixed_recurrent_inputs() -> Iterator[None]:
    """Let recurrent layers take 16-bit inputs while the code sees float32 weights, as under autocast."""
    original = RNNBase.check_input

    def check_input(self: RNNBase, input: Any, batch_sizes: Any) -> None:
        first: Any = self._flat_weights[0]
        alike: Any = SimpleNamespace(dtype=first.dtype, dim=input.dim, size=input.size)
        original(self, alike, batch_sizes)

    with patched([Replacement(RNNBase, "check_input", check_input)]):
        yield


def region_switched_on(policy_enabled: bool, policy_dtype: torch.dtype) -> Region | None:
    """Return the region where the model's code enables autocast for a device, or ``None``."""
    dtypes = [_dtype(device) for device in _DEVICES if _enabled(device)]
    if not dtypes:
        return None
    is_policy = policy_enabled and dtypes[0] == policy_dtype
    return Region(RegionKind.POLICY) if is_policy else Region(RegionKind.OWN, dtypes[0])


def current_region(policy_enabled: bool, policy_dtype: torch.dtype) -> Region:
    """Return the innermost region, by flags that differ from those of ``autocast_visible``."""
    for device in _DEVICES:
        enabled, dtype = _enabled(device), _dtype(device)
        if policy_enabled and not enabled:
            return Region(RegionKind.DISABLED)
        if enabled and (not policy_enabled or dtype != policy_dtype):
            return Region(RegionKind.OWN, dtype)
    return Region(RegionKind.POLICY)
