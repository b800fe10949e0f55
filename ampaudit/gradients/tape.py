"""Remembers a lock-step run, so that one can go back through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ampaudit.run.lockstep import Pair, StepCall, Watch
from ampaudit.run.measure import BlockMeasure
from ampaudit.run.program import Program
from ampaudit.run.step import Step
from ampaudit.trace.graph import Slot

__all__ = ["Tape", "Taped", "needs_gradient"]

_STOPS = ("aten.detach.default", "aten.detach_.default", "aten.detach_copy.default")


@dataclass(frozen=True, slots=True)
class Taped:
    """One step as it was called.

    Attributes:
        inputs: the pairs of values that it took, by node.
        shared: whether both runs did the same thing to the same tensors.
        state: of the random numbers before it, if it draws some.
    """

    step: Step
    inputs: dict[fx.Node, Pair]
    shared: bool
    state: torch.Tensor | None


class Tape:
    """A watch that does what another does, and keeps each step that a gradient passes, with its inputs.

    No value is copied: a graph without in-place ops never changes one. So a run keeps its activations,
    FP32's and the 16-bit run's, as training does.
    """

    def __init__(self, watch: Watch, needed: frozenset[fx.Node]) -> None:
        self._watch = watch
        self._needed = needed
        self.steps: list[Taped] = []

    def expects(self, step: Step, reference: Any) -> BlockMeasure | None:
        """What the other watch expects."""
        return self._watch.expects(step, reference)

    def seen(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Let the other watch look, and remember the step."""
        result = self._watch.seen(step, reference, value, call)
        if step.node in self._needed:
            self.steps.append(Taped(step, dict(call.inputs), call.shared, call.state))
        return result


def needs_gradient(program: Program) -> frozenset[fx.Node]:
    """The nodes that a trainable parameter reaches through ops with a derivative."""
    tensors = program.traced.tensors
    found: set[fx.Node] = set()
    places = {p.node: p for p in program.traced.placeholders}
    for node in program.inputs:
        tensor = tensors.get(node.name)
        trainable = places[node.name].slot is Slot.PARAMETER and tensor is not None and tensor.requires_grad
        if trainable:
            found.add(node)
    for step in program.steps:
        passes = step.differentiable and str(step.target) not in _STOPS
        floats = any(d is not None and d.is_floating_point for d in step.dtypes)
        if passes and floats and any(used in found for used in step.node.all_input_nodes):
            found.add(step.node)
    return frozenset(found)
