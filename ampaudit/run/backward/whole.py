"""Calls a custom autograd function as a whole, where what its backward does could not be followed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ampaudit.trace.graph import OwnCall

__all__ = ["call_whole"]


def call_whole(
    call: OwnCall, values: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The gradients of what it is given, from those of its outputs, on kernels of the tensors' own dtypes.

    Args:
        call: the function, with its arguments that are no tensors.
        values: its tensors.
        gradients: of those outputs that have one, ``None`` where nothing has arrived.
    """
    leaves = [v.detach().clone().requires_grad_(v.is_floating_point()) for v in values]
    args: list[Any] = list(call.args)
    for place, leaf in zip(call.tensors, leaves, strict=True):
        args[place] = leaf
    with torch.enable_grad():
        made: Any = call.function.apply(*args)
    outputs = made if isinstance(made, tuple | list) else (made,)
    pairs = [
        (outputs[place], gradient.to(outputs[place].dtype))
        for place, gradient in zip(call.outputs, gradients, strict=True)
        if gradient is not None
    ]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    return [next(found) if leaf.requires_grad else None for leaf in leaves]
