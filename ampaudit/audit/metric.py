"""Evaluates the model file's ``metric(output, batch)`` in FP32 and in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ampaudit.core.errors import InputError
from ampaudit.run.share import ALONE, BatchNumbers, Share
from ampaudit.source import Batch, ModelSource
from ampaudit.source.user_code import calling_user_code
from ampaudit.trace.entry import flatten_outputs
from ampaudit.trace.isolation import call_unchanged

Outputs = Mapping[int, Mapping[str, tuple[Any, Any]]]  # by batch and name: in FP32 and in 16 bits


def metric_of(source: ModelSource, outputs: Outputs, share: Share = ALONE) -> tuple[float, float]:
    """Return the metric's means over the batches of all machines, in FP32 and in 16 bits.

    Raises:
        InputError: The metric does not return a number.
        PartDone: Another machine computes the means.
    """
    return mean_metric(share.gathered(metrics_of(source, outputs)).values())


def metrics_of(source: ModelSource, outputs: Outputs) -> BatchNumbers:
    """Return the metric of each batch, in FP32 and in 16 bits.

    Raises:
        InputError: The metric does not return a number.
    """
    assert source.metric is not None
    values: BatchNumbers = {}
    for number, pairs in outputs.items():
        batch = source.batches[number]
        with calling_user_code(source.location):  # for the structure of its output
            output = call_unchanged(source.model, batch.args, batch.kwargs, seed=number)
        sides = ({name: pair[side] for name, pair in pairs.items()} for side in (0, 1))
        values[number] = [_metric(source.metric, _with(output, tensors), batch) for tensors in sides]
    return values


def mean_metric(batches: Collection[Sequence[float]]) -> tuple[float, float]:
    """Return the means of a metric over the batches, in FP32 and in 16 bits."""
    exact, lower = (sum(side) / len(batches) for side in zip(*batches, strict=True))
    return exact, lower


def within_drop(exact: float, lower: float, drop: float) -> bool:
    """Return whether a metric is at most ``drop`` below FP32's, up to rounding."""
    return exact - lower <= drop + 1e-12 * max(1.0, abs(exact))


def _with(output: Any, tensors: Mapping[str, Any]) -> Any:
    """Replace the tensors of an output by those of a run; other parts, such as a cache, stay."""
    names = {id(tensor): name for name, tensor in flatten_outputs(output)}
    leaves, spec = pytree.tree_flatten(output)
    for place, leaf in enumerate(leaves):
        if names.get(id(leaf)) in tensors:
            value = tensors[names[id(leaf)]]
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            leaves[place] = value.float().cpu() if is_float else value  # which every metric supports
    return pytree.tree_unflatten(leaves, spec)


def _metric(metric: Callable[..., Any], output: Any, batch: Batch) -> float:
    with calling_user_code("metric(output, batch)"), torch.no_grad():
        value = metric(output, batch.whole)
        number = float(value)
    if number != number:
        return float("-inf")  # NaN is as bad as a metric can be
    if isinstance(value, str):
        raise InputError("metric(output, batch) returned a string", hint="return a number, larger is better")
    return number
