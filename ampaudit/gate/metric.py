"""The model file's own ``metric(output, batch)``, in FP32 and in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ampaudit.errors import InputError
from ampaudit.gate.budgets import Measured
from ampaudit.source import Batch, ModelSource
from ampaudit.source.user_code import calling_user_code
from ampaudit.trace.entry import flatten_outputs

__all__ = ["Outputs", "with_metric"]

Outputs = dict[int, list[tuple[Any, Any]]]  # of each batch: the pairs of FP32's and the 16-bit run's tensors


def with_metric(measured: Measured, source: ModelSource, outputs: Outputs) -> Measured:
    """The same, with the means of the metric over the batches, if the model file has one.

    Raises:
        InputError: the metric gives no number.
    """
    if source.metric is None or not outputs:
        return measured
    exact, lower = [], []
    for number, pairs in outputs.items():
        batch = source.batches[number]
        made = _called(source, batch)
        exact.append(_metric(source.metric, _with(made, [first for first, _ in pairs]), batch))
        lower.append(_metric(source.metric, _with(made, [second for _, second in pairs]), batch))
    count = len(exact)
    return replace(measured, metric_fp32=sum(exact) / count, metric_lower=sum(lower) / count)


@torch.no_grad()
def _called(source: ModelSource, batch: Batch) -> Any:
    """The model's own output, for its structure."""
    with torch.random.fork_rng(devices=[]), calling_user_code(source.location):
        return source.model(*batch.args, **batch.kwargs)


def _with(output: Any, tensors: Sequence[Any]) -> Any:
    """The output with other tensors in it: those of a run, in the order in which they are found."""
    places = {id(tensor): index for index, (_, tensor) in enumerate(flatten_outputs(output))}
    leaves, spec = pytree.tree_flatten(output)
    changed = [_float(tensors[places[id(leaf)]]) if id(leaf) in places else leaf for leaf in leaves]
    return pytree.tree_unflatten(changed, spec)


def _float(value: Any) -> Any:
    """16-bit values as float32, in which any metric can be computed on any device."""
    return value.float().cpu() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _metric(metric: Callable[..., Any], output: Any, batch: Batch) -> float:
    given = batch.kwargs if batch.kwargs and not batch.args else batch.args
    given = given[0] if isinstance(given, tuple) and len(given) == 1 else given
    with calling_user_code("metric(output, batch)"), torch.no_grad():
        value = metric(output, given)
        number = float(value)
    if number != number:
        return float("-inf")  # NaN is as bad as a metric can be
    if isinstance(value, str):
        raise InputError("metric(output, batch) returned a text", hint="return a number, larger is better")
    return number
