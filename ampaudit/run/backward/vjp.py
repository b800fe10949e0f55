"""Computes a step's vector-Jacobian product: the gradients of its inputs from those of its outputs.

Each is what torch's ``derivatives.yaml`` says, in the same ATen ops; autograd is the test's oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.run.backends import Backend
from ampaudit.run.backward.tape import TapeEntry, unseen_write
from ampaudit.run.device import restore_random_state
from ampaudit.trace.opnames import named_arguments

__all__ = ["vjp"]

aten = torch.ops.aten
Tensors = Mapping[str, torch.Tensor | None]
# from the call's arguments by name, the names that are wanted and the output's gradient to theirs;
# None where the call is of a form that the formula is not for
Formula = Callable[[Mapping[str, Any], frozenset[str], torch.Tensor], Tensors | None]


def vjp(
    entry: TapeEntry,
    side: int,
    backend: Backend,
    wanted: Sequence[fx.Node],
    gradients: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Return the gradients of the wanted inputs, in float32 carriers or, if native, in their dtypes.

    The step is called again on detached inputs, so that autograd sees this op and nothing else; random
    numbers are drawn again from the same state.

    Args:
        entry: the step, with the values that it took.
        side: 0 for FP32's values, 1 for the 16-bit run's.
        backend: how that side computes.
        wanted: input nodes to differentiate by.
        gradients: of the step's outputs, ``None`` where there is none.
    """
    step = entry.step
    if unseen_write(step) and not backend.follows_writes:
        first = step.node.all_input_nodes[0]
        return [gradients[0] if node is first else None for node in wanted]
    if step.site is not None and step.site.role.converts and list(wanted) == [step.node.args[0]]:
        gradient = gradients[0]  # autograd would only convert it
        return [None if gradient is None else _like(gradient, entry.inputs[wanted[0]][side])]
    if (quick := _by_formula(entry, side, backend, wanted, gradients)) is not None:
        return quick
    leaves = {node: entry.inputs[node][side].detach().requires_grad_() for node in wanted}
    values = {node: leaves.get(node, pair[side]) for node, pair in entry.inputs.items()}
    args, kwargs = backend.arguments(step)
    args = fx.node.map_arg(args, lambda node: values[node])
    kwargs = fx.node.map_arg(kwargs, lambda node: values[node])
    if kwargs.get("sparse"):
        kwargs = kwargs | {"sparse": False}
    if entry.state is not None:
        restore_random_state(entry.state, next(iter(leaves.values())).device)
    with torch.enable_grad():
        made: Any = backend.differentiable(step, args, kwargs)
    outputs = made if isinstance(made, list | tuple) else (made,)
    pairs = [
        (output, _like(gradient, output))
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and isinstance(output, torch.Tensor) and output.requires_grad
    ]
    if not pairs:
        return [None] * len(wanted)
    found = torch.autograd.grad(
        [output for output, _ in pairs],
        [leaves[node] for node in wanted],
        [gradient for _, gradient in pairs],
        allow_unused=True,
    )
    # an embedding may ask for a sparse gradient: the numbers in it are the same
    return [g.to_dense() if g is not None and g.is_sparse else g for g in found]


def _by_formula(
    entry: TapeEntry,
    side: int,
    backend: Backend,
    wanted: Sequence[fx.Node],
    gradients: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None] | None:
    """Return the gradients by a closed formula, without calling the step again, if there is one."""
    step, gradient = entry.step, gradients[0]
    formula = FORMULAS.get(str(step.target))
    if formula is None or gradient is None or not isinstance(step.target, OpOverload):
        return None
    args, kwargs = backend.arguments(step)
    named = named_arguments(step.target, args, kwargs)
    places = {node: name for name, node in named.items() if isinstance(node, fx.Node)}
    if len(places) != sum(isinstance(value, fx.Node) for value in named.values()):
        return None  # one value in two places
    given = fx.node.map_arg(named, lambda node: entry.inputs[node][side])
    names = [places[node] for node in wanted]
    found = formula(given, frozenset(names), _like(gradient, next(iter(entry.inputs.values()))[side]))
    return None if found is None else [found[name] for name in names]


def _like(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.dtype == output.dtype else gradient.to(output.dtype)


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
