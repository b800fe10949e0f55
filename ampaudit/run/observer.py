"""Shows pairs of values to observers, with the call that made them."""

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
        """Return an object that measures the converted run's step block by block, if any."""
        del step, reference
        return None

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Observe a pair; the returned value continues in the converted run (normally ``value`` itself)."""
        del step, reference, call
        return value


class StepCall:
    """The resolved arguments of one step, with which observers can call it again."""

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
        self.state: torch.Tensor | None = None  # of the random numbers, before a step that draws some
        self.resized: str | None = None  # the sizes that the 16-bit run's own choices would have given
        self._template = reference.arguments(step)
        args, kwargs = (reference if shared else backend).arguments(step)
        self.args, self.kwargs = resolved(args, inputs, 1), resolved(kwargs, inputs, 1)

    def updates(self, step: Step) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return written arguments besides the result: their position, and their value in both runs."""
        if not step.updates:
            return []
        args, kwargs = resolved(self._template, self.inputs, 0)
        at = step.written_at
        return [(p, at(p, args, kwargs), at(p, self.args, self.kwargs)) for p, _ in step.updates]

    @property
    def ref_args(self) -> tuple[Any, ...]:
        """The reference's positional arguments."""
        args: tuple[Any, ...] = resolved(self._template[0], self.inputs, 0)
        return args


def resolved(template: Any, inputs: dict[fx.Node, Pair], side: int) -> Any:
    """Put values in the places of nodes: of the reference (0) or of the 16-bit run (1)."""
    return fx.node.map_arg(template, lambda node: inputs[node][side])
