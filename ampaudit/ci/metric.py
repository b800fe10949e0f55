"""Evaluates the model file's ``metric(output, batch)`` in FP32 and in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ampaudit.core.errors import InputError
from ampaudit.report.budgets import Measurements
from ampaudit.source import Batch, ModelSource
from ampaudit.source.user_code import calling_user_code
from ampaudit.trace.entry import flatten_outputs
from ampaudit.trace.isolation import call_unchanged

__all__ = ["Outputs", "with_metric"]

Outputs = dict[int, dict[str, tuple[Any, Any]]]  # of each batch, by name: FP32's and the 16-bit run's


def with_metric(measured: Measurements, source: ModelSource, outputs: Outputs) -> Measurements:
    """Add the metric's means over the batches, if the model file has one.

    Raises:
        InputError: the metric gives no number.
    """
    if source.metric is None or not outputs:
        return measured
    exact, lower = [], []
    for number, pairs in outputs.items():
        batch = source.batches[number]
        with calling_user_code(source.location):  # for the structure of its output
            made = call_unchanged(source.model, batch.args, batch.kwargs, seed=number)
        exact.append(
            _metric(source.metric, _with(made, {n: first for n, (first, _) in pairs.items()}), batch)
        )
        lower.append(
            _metric(source.metric, _with(made, {n: second for n, (_, second) in pairs.items()}), batch)
        )
    count = len(exact)
    return replace(measured, metric_fp32=sum(exact) / count, metric_lower=sum(lower) / count)


def _with(output: Any, tensors: Mapping[str, Any]) -> Any:
    """Replace the tensors of an output by those of a run; the rest, such as a cache, stays."""
    names = {id(tensor): name for name, tensor in flatten_outputs(output)}
    leaves, spec = pytree.tree_flatten(output)
    changed = [
        _float(tensors[names[id(leaf)]]) if names.get(id(leaf)) in tensors else leaf for leaf in leaves
    ]
    return pytree.tree_unflatten(changed, spec)


def _float(value: Any) -> Any:
    """Widen 16-bit values to float32, in which any metric can be computed on any device."""
    return value.float().cpu() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _metric(metric: Callable[..., Any], output: Any, batch: Batch) -> float:
    with calling_user_code("metric(output, batch)"), torch.no_grad():
        value = metric(output, batch.whole)
        number = float(value)
    if number != number:
        return float("-inf")  # NaN is as bad as a metric can be
    if isinstance(value, str):
        raise InputError("metric(output, batch) returned a string", hint="return a number, larger is better")
    return number
