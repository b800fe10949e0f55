"""Computes a step's vector-Jacobian product: the gradients of its inputs from those of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.run.backends import Backend
from ampaudit.run.backward.formulas import FORMULAS
from ampaudit.run.backward.tape import TapeEntry, unseen_write
from ampaudit.run.device import restore_random_state
from ampaudit.trace.opnames import named_arguments

__all__ = ["vjp"]


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
