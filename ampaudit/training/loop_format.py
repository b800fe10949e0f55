"""Finds the 16-bit format in which a training loop computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ampaudit.core.formats import FLOAT16, Dtype, NumberFormat, format_named, low_precision_format
from ampaudit.trace.values import LOW_PRECISION_DTYPES, dtype_name

__all__ = ["LoopFormat"]


class LoopFormat:
    """The format of a loop: the caller's, that of the parameters, or that of autocast.

    Autocast is detected in the forward passes before the first measured step; the default is float16.

    Args:
        model: Model that is trained.
        dtype: Format, if the caller knows it.
        reason: Source of the caller's format, for the report.

    Attributes:
        form: Number format.
        reason: Source of the format, as it follows the format's name; empty if the user chose it.
    """

    def __init__(self, model: nn.Module, dtype: Dtype | None, reason: str = "") -> None:
        self.form: NumberFormat = FLOAT16
        self.reason = "by default: the loop has neither 16-bit parameters nor autocast"
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        sizes = dict.fromkeys(LOW_PRECISION_DTYPES, 0)
        for parameter in model.parameters():
            if parameter.dtype in sizes:
                sizes[parameter.dtype] += parameter.numel()
        largest = max(sizes, key=sizes.__getitem__)
        if dtype is not None:
            self.form, self.reason = low_precision_format(dtype), reason
        elif sizes[largest]:
            self.form, self.reason = format_named(dtype_name(largest)), "the format of the parameters"
        else:
            for module in model.modules():
                if any(True for _ in module.parameters(recurse=False)):
                    self._hooks.append(module.register_forward_pre_hook(self._see))

    def _see(self, module: nn.Module, _: Any) -> None:
        kind = next(module.parameters(recurse=False)).device.type
        if torch.is_autocast_enabled(kind):
            self.form = format_named(dtype_name(torch.get_autocast_dtype(kind)))
            self.reason = "the format of autocast"
            self.settle()

    def settle(self) -> None:
        """Stop looking for autocast."""
        while self._hooks:
            self._hooks.pop().remove()
