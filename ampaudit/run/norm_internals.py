"""Computes the largest square inside a norm or variance, which an unfused kernel holds in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from ampaudit.run.step import Step
from ampaudit.trace.opnames import base_name, named_arguments
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["NORMS", "inside_peak"]

Named = dict[str, Any]


def inside_peak(step: Step, ref_args: tuple[Any, ...], limit: float) -> torch.Tensor | None:
    """Return the peak of (x - mean)^2 or x^2 over an op's reference input, as a scalar on its device.

    ``None`` where the op squares nothing, is not given 16 bits, or, on a CPU, where its input is too small
    for a square to pass ``limit``.
    """
    if not isinstance(step.target, OpOverload):
        return None
    centred = NORMS.get(base_name(step.target))
    if centred is None or not _takes_low_precision(step):
        return None
    if not ref_args or not isinstance(ref_args[0], torch.Tensor):
        return None
    x = ref_args[0].float()
    if not x.numel():
        return None
    if x.device.type == "cpu":
        low, high = torch.aminmax(x)
        if max(high - low, high, -low).item() ** 2 < limit:
            return None
    return centred(x, named_arguments(step.target, ref_args, dict(step.kwargs))).abs().amax().square()


def _takes_low_precision(step: Step) -> bool:
    dtypes = [getattr(n.meta.get("val"), "dtype", None) for n in step.node.all_input_nodes[:1]]
    return any(dtype in LOW_PRECISION_DTYPES for dtype in (*dtypes, *step.dtypes))


def _plain(x: torch.Tensor, named: Named) -> torch.Tensor:
    del named
    return x


def _over_shape(x: torch.Tensor, named: Named) -> torch.Tensor:
    axes = tuple(range(-len(named["normalized_shape"]), 0))
    return x - x.mean(axes, keepdim=True)


def _over_groups(x: torch.Tensor, named: Named) -> torch.Tensor:
    grouped = x.reshape(x.shape[0], int(named["num_groups"]), -1)
    return grouped - grouped.mean(-1, keepdim=True)


def _over_axes(x: torch.Tensor, named: Named) -> torch.Tensor:
    axes = named.get("dim")
    if axes is None or axes is True or axes is False or axes == []:
        return x - x.mean()
    return x - x.mean(axes, keepdim=True)


def _over_batch(x: torch.Tensor, named: Named) -> torch.Tensor:
    """Return whether a batch norm computes batch statistics, as it does in training."""
    if not named.get("training", named.get("use_input_stats", False)):
        return x.new_zeros(1)
    return x - x.mean([d for d in range(x.ndim) if d != 1], keepdim=True)


NORMS: dict[str, Callable[[torch.Tensor, Named], torch.Tensor]] = {
    "layer_norm": _over_shape,
    "rms_norm": _plain,
    "group_norm": _over_groups,
    "batch_norm": _over_batch,
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _over_axes),
    **dict.fromkeys(("linalg_vector_norm", "norm", "cosine_similarity", "frobenius_norm"), _plain),
}
