"""Computes a step's vector-Jacobian product: the gradients of its inputs from those of its outputs.

The formulas are those of torch's ``derivatives.yaml``, in the same ATen ops; tests compare with autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.core.ops import having
from ampaudit.run.backends import Backend
from ampaudit.run.device import restore_random_state
from ampaudit.run.lockstep import Observer, Pair, StepCall, WrappedObserver
from ampaudit.run.program import Program, Step, passes_gradients
from ampaudit.trace.flatten import FUNCTION_INPUTS, FUNCTION_OUTPUTS, is_mark, mark_number, marked_values
from ampaudit.trace.functional import DETACH_OPS, OnCopy, WriteThrough, overload_of
from ampaudit.trace.graph import Slot
from ampaudit.trace.opnames import base_name, named_arguments

aten = torch.ops.aten
Tensors = Mapping[str, torch.Tensor | None]
# maps arguments by name, the names to differentiate by, and the output's gradient to the gradients by name;
# None if the formula does not apply to the call
Formula = Callable[[Mapping[str, Any], frozenset[str], torch.Tensor], Tensors | None]


def vjp(
    entry: TapeEntry,
    side: int,
    backend: Backend,
    nodes: Sequence[fx.Node],
    gradients: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Return the gradients of some inputs, in float32 carriers or, if native, in their dtypes.

    The step is called again on detached inputs, so that autograd sees this op alone; random numbers are drawn
    again from the same state.

    Args:
        entry: The step, with the values of its inputs.
        side: 0 for FP32's values, 1 for the 16-bit run's.
        backend: Backend of that side.
        nodes: Input nodes to differentiate by.
        gradients: Gradients of the step's outputs, ``None`` where there is none.
    """
    step = entry.step
    if unseen_write(step) and not backend.follows_writes:
        first = step.node.all_input_nodes[0]
        return [gradients[0] if node is first else None for node in nodes]
    if step.site is not None and step.site.role.converts and list(nodes) == [step.node.args[0]]:
        gradient = gradients[0]  # autograd would only cast it
        return [None if gradient is None else _like(gradient, entry.inputs[nodes[0]][side])]
    if (quick := _by_formula(entry, side, backend, nodes, gradients)) is not None:
        return quick
    leaves = {node: entry.inputs[node][side].detach().requires_grad_() for node in nodes}
    values = {node: leaves.get(node, pair[side]) for node, pair in entry.inputs.items()}
    args, kwargs = fx.node.map_arg(backend.arguments(step), values.__getitem__)
    if kwargs.get("sparse"):
        kwargs = kwargs | {"sparse": False}
    if entry.state is not None:
        restore_random_state(entry.state, next(iter(leaves.values())).device)
    with torch.enable_grad():
        result: Any = backend.call_differentiably(step, args, kwargs)
    outputs = result if isinstance(result, list | tuple) else (result,)
    pairs = [
        (output, _like(gradient, output))
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and isinstance(output, torch.Tensor) and output.requires_grad
    ]
    if not pairs:
        return [None] * len(nodes)
    with backend.deriving(step):
        results = torch.autograd.grad(
            [output for output, _ in pairs],
            [leaves[node] for node in nodes],
            [gradient for _, gradient in pairs],
            allow_unused=True,
        )
    return [None if g is None else _plain(g) for g in results]


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with its numbers in memory: not sparse, as of an embedding, and not conjugated.

    That of ``sgn`` is a tensor of zeros without memory.
    """
    if gradient._is_zerotensor():
        return torch.zeros_like(gradient)
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return dense.resolve_conj().resolve_neg()


def _by_formula(
    entry: TapeEntry,
    side: int,
    backend: Backend,
    nodes: Sequence[fx.Node],
    gradients: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None] | None:
    """Return the gradients by a closed formula, if there is one, without calling the step again."""
    step, gradient = entry.step, gradients[0]
    formula = FORMULAS.get(str(step.target))
    if formula is None or gradient is None or not isinstance(step.target, OpOverload):
        return None
    args, kwargs = backend.arguments(step)
    templates = named_arguments(step.target, args, kwargs)
    places = {node: name for name, node in templates.items() if isinstance(node, fx.Node)}
    if len(places) != sum(isinstance(value, fx.Node) for value in templates.values()):
        return None  # one value is passed twice
    values = fx.node.map_arg(templates, lambda node: entry.inputs[node][side])
    names = [places[node] for node in nodes]
    results = formula(values, frozenset(names), _like(gradient, next(iter(entry.inputs.values()))[side]))
    return None if results is None else [results[name] for name in names]


def _like(gradient: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.dtype == output.dtype else gradient.to(output.dtype)


def linear(values: Mapping[str, Any], names: frozenset[str], gradient: torch.Tensor) -> Tensors | None:
    """Y = x W^T + b: dx = g W, dW = g^T x, db = sum of g over all rows."""
    if values["weight"].dim() != 2 or not gradient.numel():
        return None
    rows = gradient.reshape(-1, gradient.shape[-1])
    gradients: dict[str, torch.Tensor | None] = {}
    if "input" in names:
        gradients["input"] = (rows @ values["weight"]).view(values["input"].shape)
    if "weight" in names:
        gradients["weight"] = rows.t() @ values["input"].reshape(-1, values["input"].shape[-1])
    if "bias" in names:
        gradients["bias"] = rows.sum(0)
    return gradients


def convolution(values: Mapping[str, Any], names: frozenset[str], gradient: torch.Tensor) -> Tensors:
    """Call torch's own backward of a convolution, which requires a batch dimension."""
    value, weight, bias = values["input"], values["weight"], values.get("bias")
    spatial = weight.dim() - 2
    if unbatched := value.dim() == spatial + 1:
        value, gradient = value.unsqueeze(0), gradient.unsqueeze(0)
    sizes = {
        name: _each(values.get(name, default), spatial)
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    }
    mask = [name in names for name in ("input", "weight", "bias")]
    results = aten.convolution_backward(
        gradient,
        value,
        weight,
        None if bias is None else list(bias.shape),
        sizes["stride"],
        sizes["padding"],
        sizes["dilation"],
        False,
        [0] * spatial,
        values.get("groups", 1),
        mask,
    )
    gradients = {
        name: g for name, g, needed in zip(("input", "weight", "bias"), results, mask, strict=True) if needed
    }
    if unbatched and "input" in gradients:
        gradients["input"] = gradients["input"].squeeze(0)
    return gradients


def relu(values: Mapping[str, Any], names: frozenset[str], gradient: torch.Tensor) -> Tensors:
    """Return the gradient where x > 0, and 0 elsewhere."""
    return {"self": aten.threshold_backward(gradient, values["self"], 0)}


def matmul(values: Mapping[str, Any], names: frozenset[str], gradient: torch.Tensor) -> Tensors:
    """Y = A B, both of three dimensions or both of two: dA = G B^T, dB = A^T G."""
    first, second = values["self"], values.get("mat2", values.get("other"))
    gradients: dict[str, torch.Tensor | None] = {}
    if "self" in names:
        gradients["self"] = gradient @ second.mT
    for name in ("mat2", "other"):
        if name in names:
            gradients[name] = first.mT @ gradient
    return gradients


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


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """One step with the arguments of its call."""

    step: Step
    inputs: dict[fx.Node, Pair]  # pairs of operands, by node
    computed_once: bool  # whether both runs made the same call on the same tensors
    state: torch.Tensor | None  # random state before the call, if it draws random numbers


class Tape(WrappedObserver):
    """Wraps another observer and records each differentiable step, and marks, with their inputs.

    Values are not copied, since a graph without in-place ops never changes them. So a run keeps its
    activations, FP32's and the 16-bit run's, as training does.
    """

    def __init__(self, observer: Observer, needed: frozenset[fx.Node]) -> None:
        super().__init__(observer)
        self.needed = needed  # nodes whose gradients are needed
        self.steps: list[TapeEntry] = []  # the recorded steps and marks, in order

    @property
    def marks(self) -> list[TapeEntry]:
        """The marks among the steps."""
        return [entry for entry in self.steps if is_mark(entry.step.target)]

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Record the step."""
        result = super().observe(step, reference, value, call)
        passes = step.node in self.needed and (passes_gradients(step.node) or unseen_write(step))
        if passes or is_mark(step.target):
            self.steps.append(TapeEntry(step, dict(call.inputs), call.computed_once, call.state))
        return result


def unseen_write(step: Step) -> bool:
    """Return whether the model's code writes in place with gradients disabled, unseen by autograd."""
    if isinstance(step.target, WriteThrough):
        return step.target.unseen
    return isinstance(step.target, OnCopy) and not passes_gradients(step.node)


def needs_gradient(program: Program) -> frozenset[fx.Node]:
    """Return the nodes that a trainable parameter reaches through differentiable ops."""
    tensors = program.traced.tensors
    reached: set[fx.Node] = set()
    places = {p.node: p for p in program.traced.placeholders}
    with_leaves = {custom.number for custom in program.traced.custom_backwards if custom.leaves}
    for node in program.inputs:
        tensor = tensors.get(node.name)
        trainable = places[node.name].slot is Slot.PARAMETER and tensor is not None and tensor.requires_grad
        if trainable:
            reached.add(node)
    entered: dict[int, list[fx.Node]] = {}
    for step in program.steps:
        if step.target is FUNCTION_INPUTS:
            entered[mark_number(step.node)] = marked_values(step.node)
        elif step.target is FUNCTION_OUTPUTS:
            # leaves of a function are only known at its end; without differentiable inputs and leaves,
            # its outputs have no gradient
            if reached.intersection(entered[mark_number(step.node)]) or mark_number(step.node) in with_leaves:
                reached.update(marked_values(step.node))
            continue
        if unseen_write(step) and step.node.all_input_nodes[0] in reached:
            reached.add(step.node)
        op = overload_of(step.node.target)  # that of the step fills what "empty" makes
        cut = op is not None and base_name(op) in having("reads_shape")
        passes = passes_gradients(step.node) and str(step.target) not in DETACH_OPS and not cut
        floats = any(d is not None and (d.is_floating_point or d.is_complex) for d in step.dtypes)
        if passes and floats and any(used in reached for used in step.node.all_input_nodes):
            reached.add(step.node)
    return frozenset(reached)
