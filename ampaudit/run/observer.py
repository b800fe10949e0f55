"""Observers of pairs of values, and the calls that computed them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ampaudit.run.backends import Backend, Float32Backend
from ampaudit.run.measure import BlockMeasure
from ampaudit.run.step import Step

__all__ = ["Observer", "Pair", "StepCall", "resolved"]

Pair = tuple[Any, Any]


class Observer:
    """Observes the values of each step; the base class ignores them."""

    __slots__ = ()

    def block_measure(self, step: Step, reference: Any) -> BlockMeasure | None:
        """Return an object that measures the 16-bit result block by block, if any."""
        del step, reference
        return None

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Observe a pair; the 16-bit run continues with the returned value (normally ``value`` itself)."""
        del step, reference, call
        return value


class StepCall:
    """The resolved arguments of one step, so that observers can call it again."""

    __slots__ = ("_template", "args", "inputs", "kwargs", "measure", "resized", "shared", "state")

    def __init__(
        self,
        inputs: dict[fx.Node, Pair],
        step: Step,
        reference: Float32Backend,
        backend: Backend,
        shared: bool,
    ) -> None:
        self.inputs = inputs
        self.shared = shared
        self.measure: BlockMeasure | None = None
        self.state: torch.Tensor | None = None  # random state before the call, if it draws random numbers
        self.resized: str | None = None  # sizes that the 16-bit run's own choices would have produced
        self._template = reference.arguments(step)
        args, kwargs = (reference if shared else backend).arguments(step)
        self.args, self.kwargs = resolved(args, inputs, 1), resolved(kwargs, inputs, 1)

    def updates(self, step: Step) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return the position and both values of written arguments other than the result."""
        if not step.updates:
            return []
        args, kwargs = resolved(self._template, self.inputs, 0)
        at = step.written_at
        return [(p, at(p, args, kwargs), at(p, self.args, self.kwargs)) for p, _ in step.updates]

    @property
    def ref_args(self) -> tuple[Any, ...]:
        """Positional arguments of the reference's call."""
        args: tuple[Any, ...] = resolved(self._template[0], self.inputs, 0)
        return args


def resolved(template: Any, inputs: dict[fx.Node, Pair], side: int) -> Any:
    """Replace nodes by their values in the reference (side 0) or the 16-bit run (side 1)."""
    return fx.node.map_arg(template, lambda node: inputs[node][side])
