"""Derivatives that do not need the op's result, so that its forward is not computed again.

Each is what torch's ``derivatives.yaml`` says, in the same ATen ops; autograd is the test's oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["FORMULAS", "Formula"]

aten = torch.ops.aten
Tensors = Mapping[str, torch.Tensor | None]
# from the call's arguments by name, the names that are wanted and the output's gradient to theirs;
# None where the call is of a form that the formula is not for
Formula = Callable[[Mapping[str, Any], frozenset[str], torch.Tensor], Tensors | None]


def linear(given: Mapping[str, Any], wanted: frozenset[str], gradient: torch.Tensor) -> Tensors | None:
    """Y = x W^T + b: dx = g W, dW = g^T x, db = sum of g over all rows."""
    if given["weight"].dim() != 2 or not gradient.numel():
        return None
    rows = gradient.reshape(-1, gradient.shape[-1])
    found: dict[str, torch.Tensor | None] = {}
    if "input" in wanted:
        found["input"] = (rows @ given["weight"]).view(given["input"].shape)
    if "weight" in wanted:
        found["weight"] = rows.t() @ given["input"].reshape(-1, given["input"].shape[-1])
    if "bias" in wanted:
        found["bias"] = rows.sum(0)
    return found


def convolution(given: Mapping[str, Any], wanted: frozenset[str], gradient: torch.Tensor) -> Tensors:
    """Call torch's own backward of a convolution, which requires a batch dimension."""
    value, weight, bias = given["input"], given["weight"], given.get("bias")
    spatial = weight.dim() - 2
    if unbatched := value.dim() == spatial + 1:
        value, gradient = value.unsqueeze(0), gradient.unsqueeze(0)
    sizes = {
        name: _each(given.get(name, default), spatial)
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    }
    mask = [name in wanted for name in ("input", "weight", "bias")]
    made = aten.convolution_backward(
        gradient,
        value,
        weight,
        None if bias is None else list(bias.shape),
        *(sizes["stride"], sizes["padding"], sizes["dilation"]),
        False,
        [0] * spatial,
        given.get("groups", 1),
        mask,
    )
    found = {name: g for name, g, asked in zip(("input", "weight", "bias"), made, mask, strict=True) if asked}
    if unbatched and "input" in found:
        found["input"] = found["input"].squeeze(0)
    return found


def relu(given: Mapping[str, Any], wanted: frozenset[str], gradient: torch.Tensor) -> Tensors:
    """The gradient where x > 0, else 0."""
    del wanted
    return {"self": aten.threshold_backward(gradient, given["self"], 0)}


def matmul(given: Mapping[str, Any], wanted: frozenset[str], gradient: torch.Tensor) -> Tensors:
    """Y = A B, both of three dimensions or both of two: dA = G B^T, dB = A^T G."""
    first, second = given["self"], given.get("mat2", given.get("other"))
    found: dict[str, torch.Tensor | None] = {}
    if "self" in wanted:
        found["self"] = gradient @ second.mT
    for name in ("mat2", "other"):
        if name in wanted:
            found[name] = first.mT @ gradient
    return found


def _each(value: Any, count: int) -> list[int]:
    return [value] * count if isinstance(value, int) else list(value) * (count if len(value) == 1 else 1)


FORMULAS: dict[str, Formula] = {
    "aten.linear.default": linear,
    "aten.conv1d.default": convolution,
    "aten.conv2d.default": convolution,
    "aten.conv3d.default": convolution,
    "aten.relu.default": relu,
    "aten.mm.default": matmul,
    "aten.bmm.default": matmul,
}
