"""Records a lock-step run for its backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ampaudit.run.measure import BlockMeasure
from ampaudit.run.observer import Observer, Pair, StepCall
from ampaudit.run.program import Program
from ampaudit.run.step import Step
from ampaudit.trace.flatten import (
    FUNCTION_INPUTS,
    FUNCTION_OUTPUTS,
    is_mark,
    mark_number,
    marked_values,
)
from ampaudit.trace.functional import DETACH_OPS, OnCopy, WriteThrough
from ampaudit.trace.graph import Slot

__all__ = ["Tape", "TapeEntry", "needs_gradient", "unseen_write"]


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """One step with the arguments of its call.

    Attributes:
        inputs: Pairs of operands, by node.
        shared: Whether both runs made the same call on the same tensors.
        state: Random state before the call, if it draws random numbers.
    """

    step: Step
    inputs: dict[fx.Node, Pair]
    shared: bool
    state: torch.Tensor | None


class Tape(Observer):
    """Wraps another observer and records each differentiable step, and marks, with their inputs.

    Values are not copied, since a graph without in-place ops never changes them. So a run keeps its
    activations, FP32's and the 16-bit run's, as training does.
    """

    def __init__(self, observer: Observer, needed: frozenset[fx.Node]) -> None:
        self._observer = observer
        self._needed = needed
        self.steps: list[TapeEntry] = []
        self.marks: list[TapeEntry] = []

    def block_measure(self, step: Step, reference: Any) -> BlockMeasure | None:
        """Delegate to the wrapped observer."""
        return self._observer.block_measure(step, reference)

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Delegate to the wrapped observer, and record the step."""
        result = self._observer.observe(step, reference, value, call)
        if is_mark(step.target):
            self.marks.append(TapeEntry(step, dict(call.inputs), call.shared, call.state))
            self.steps.append(self.marks[-1])
        elif step.node in self._needed and (step.differentiable or unseen_write(step)):
            self.steps.append(TapeEntry(step, dict(call.inputs), call.shared, call.state))
        return result


def unseen_write(step: Step) -> bool:
    """Return whether the model's code writes in place with gradients disabled, unseen by autograd."""
    if isinstance(step.target, WriteThrough):
        return step.target.unseen
    return isinstance(step.target, OnCopy) and not step.differentiable


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
        passes = step.differentiable and str(step.target) not in DETACH_OPS
        floats = any(d is not None and d.is_floating_point for d in step.dtypes)
        if passes and floats and any(used in reached for used in step.node.all_input_nodes):
            reached.add(step.node)
    return frozenset(reached)
