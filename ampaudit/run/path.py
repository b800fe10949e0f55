"""Keeps the 16-bit run on the path that a graph is valid for."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampaudit.run.backends import Backend
from ampaudit.run.step import Step

__all__ = ["represented", "same_shapes", "shape_of", "with_fp32_choices_in"]


def same_shapes(reference: Any, value: Any) -> bool:
    """Return whether two results of an op have the same shapes."""
    sides = [pytree.tree_leaves(reference), pytree.tree_leaves(value)]
    first, second = ([getattr(leaf, "shape", None) for leaf in leaves] for leaves in sides)
    return first == second


def shape_of(result: Any) -> str:
    """Return the sizes of an op's (first) result, such as ``3x16``."""
    shape = next((leaf.shape for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)), ())
    return "x".join(map(str, shape)) or "one value"


def with_fp32_choices_in(inputs: dict[fx.Node, tuple[Any, Any]]) -> dict[fx.Node, tuple[Any, Any]]:
    """Give the 16-bit run the choices of FP32: the booleans and integers among an op's inputs."""

    def chosen(pair: tuple[Any, Any]) -> tuple[Any, Any]:
        reference, value = pair
        exact = isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())
        return (reference, reference) if exact else pair

    return {node: chosen(pair) for node, pair in inputs.items()}


def represented(backend: Backend, step: Step, reference: Any) -> Any:
    """Return the reference's result of a step as the 16-bit run holds it."""
    if isinstance(reference, torch.Tensor):
        return backend.represent(reference, step.dtypes[0])
    pairs = zip(reference, step.dtypes, strict=True)
    return type(reference)(
        backend.represent(item, dtype) if isinstance(item, torch.Tensor) else item for item, dtype in pairs
    )
