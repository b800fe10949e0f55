"""Keeps the 16-bit run on the path that a graph is valid for."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampaudit.run.backends import Backend, Float32Backend
from ampaudit.run.observer import Pair, StepCall
from ampaudit.run.step import Step
from ampaudit.trace.values import inexact

__all__ = ["call_on_path", "shape_of"]


def call_on_path(
    step: Step, call: StepCall, reference: Any, float32: Float32Backend, backend: Backend
) -> tuple[StepCall, Any]:
    """Call a step in 16 bits, on FP32's choices where its own give other sizes than the graph's."""
    own = "sizes that do not fit"
    with contextlib.suppress(RuntimeError, IndexError):
        result = backend.call(step, call.args, call.kwargs, call.measure)
        if reference is None or _shapes(reference) == _shapes(result):  # some only write to their arguments
            return call, result
        own = shape_of(result)
    call = StepCall(_with_fp32_choices(call.inputs), step, float32, backend, shared=False)
    call.resized = own
    result = backend.call(step, call.args, call.kwargs)
    if _shapes(reference) != _shapes(result):
        result = _represented(backend, step, reference)
    return call, result


def _shapes(result: Any) -> list[Any]:
    return [getattr(leaf, "shape", None) for leaf in pytree.tree_leaves(result)]


def shape_of(result: Any) -> str:
    """Return the sizes of an op's (first) result, such as ``3x16``."""
    shape = next((leaf.shape for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)), ())
    return "x".join(map(str, shape)) or "one value"


def _with_fp32_choices(inputs: dict[fx.Node, Pair]) -> dict[fx.Node, Pair]:
    """Give the 16-bit run the choices of FP32: the booleans and integers among an op's inputs."""

    def chosen(pair: Pair) -> Pair:
        reference, value = pair
        exact = isinstance(value, torch.Tensor) and not inexact(value)
        return (reference, reference) if exact else pair

    return {node: chosen(pair) for node, pair in inputs.items()}


def _represented(backend: Backend, step: Step, reference: Any) -> Any:
    """Return the reference's result of a step as the 16-bit run holds it."""
    if isinstance(reference, torch.Tensor):
        return backend.represent(reference, step.dtypes[0])
    pairs = zip(reference, step.dtypes, strict=True)
    return type(reference)(
        backend.represent(item, dtype) if isinstance(item, torch.Tensor) else item for item, dtype in pairs
    )
