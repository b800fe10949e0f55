"""Records a lock-step run for probes: FP32's values, and the rounding error of each op in 16 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ampaudit.run.backends import Float32Backend
from ampaudit.run.backward.tape import Tape, TapeEntry
from ampaudit.run.device import restore_random_state
from ampaudit.run.observer import Observer, StepCall, resolved
from ampaudit.run.program import Program
from ampaudit.run.step import Step, widened_tensor
from ampaudit.trace.marks import is_mark
from ampaudit.trace.values import float_value

__all__ = ["ErrorTape", "finite_difference", "float_nodes"]


class ErrorTape(Tape):
    """Records FP32's values for backward passes, and the rounding error that each op adds in 16 bits.

    Attributes:
        errors: by node, the op's result in 16 bits minus its result in FP32 on the same inputs; a list for an
            op with several results.
    """

    def __init__(self, observer: Observer, needed: frozenset[fx.Node]) -> None:
        super().__init__(observer, needed)
        self.needed = needed
        self.errors: dict[fx.Node, Any] = {}
        self._exact = Float32Backend()

    @property
    def references(self) -> dict[fx.Node, Any]:
        """FP32's values of all nodes that some step reads."""
        return {node: pair[0] for entry in self.steps for node, pair in entry.inputs.items()}

    @property
    def elements(self) -> int:
        """How many numbers a backward pass over the tape computes gradients of, at least 1."""
        return sum(v.numel() for v in self.references.values() if isinstance(v, torch.Tensor)) or 1

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Record the step with FP32's inputs only, and the error of its result."""
        result = self._observer.observe(step, reference, value, call)
        if is_mark(step.target) or step.node in self.needed or step.decides:
            inputs = {node: (pair[0], pair[0]) for node, pair in call.inputs.items()}
            self.steps.append(TapeEntry(step, inputs, True, call.state))
            if is_mark(step.target):
                self.marks.append(self.steps[-1])
        if step.low_precision and step.makes_values and not call.shared and not step.mutates:
            self.errors[step.node] = self._error(step, result, call)
        return result

    def _error(self, step: Step, value: Any, call: StepCall) -> Any:
        inputs = {n: (_widened(p[1]), None) for n, p in call.inputs.items()}
        args, kwargs = self._exact.arguments(step)
        if call.state is not None:
            device = next((p[0].device for p in inputs.values() if isinstance(p[0], torch.Tensor)), None)
            restore_random_state(call.state, device or torch.device("cpu"))
        exact = self._exact.call(step, resolved(args, inputs, 0), resolved(kwargs, inputs, 0))
        if isinstance(exact, torch.Tensor):
            return finite_difference(value, exact)
        return [
            finite_difference(v, x) if isinstance(x, torch.Tensor) else None
            for v, x in zip(value, exact, strict=True)
        ]


def _widened(value: Any) -> Any:
    return widened_tensor(value) if isinstance(value, torch.Tensor) else value


def finite_difference(value: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the error of finite elements; what overflows is not a matter of rounding."""
    if value.shape != exact.shape or not (exact.is_floating_point() or exact.is_complex()):
        return torch.zeros_like(exact)
    return torch.nan_to_num(widened_tensor(value) - exact, 0.0, 0.0, 0.0)


def float_nodes(program: Program) -> frozenset[fx.Node]:
    """Return the nodes that a gradient may be for: all that hold floating-point values."""
    found = {node for node in program.inputs if float_value(node.meta.get("val")) is not None}
    for step in program.steps:
        if any(dtype is not None and (dtype.is_floating_point or dtype.is_complex) for dtype in step.dtypes):
            found.add(step.node)
    return frozenset(found)
