"""Runs a model in 16 bits at some places, and in FP32 everywhere else."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from ampaudit.run.backends import Emulated, Float32Backend
from ampaudit.run.lockstep import LockStep
from ampaudit.run.measure import BlockMeasure
from ampaudit.run.observer import Pair
from ampaudit.run.step import Step
from ampaudit.trace.graph import Placeholder

__all__ = ["PartialLockStep"]


class _PartialBackend(Emulated):
    """A backend that emulates 16 bits at some nodes, and computes FP32 at all others."""

    def __init__(self, inner: Emulated, rounding: Collection[fx.Node]) -> None:
        self.name = inner.name
        self._inner = inner
        self._exact = Float32Backend()
        self._rounding = rounding

    def rounds(self, step: Step) -> bool:
        if step.target is torch.ops.aten.view.dtype:  # the bits of a carrier are not those of the format
            return True
        return step.rounds and step.node in self._rounding

    def represent(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        return self._inner.represent(tensor, dtype)

    def arguments(self, step: Step) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self._inner if self.rounds(step) else self._exact).arguments(step)

    def call(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], measure: BlockMeasure | None = None
    ) -> Any:
        if self.rounds(step):
            return self._inner.call(step, args, kwargs, measure)
        return self._exact.call(step, args, kwargs)


class PartialLockStep(LockStep):
    """A lock-step of the same program that rounds only at some places.

    Args:
        whole: the executor of the whole program.
        rounding: steps and placeholders that are rounded to 16 bits.
    """

    def __init__(self, whole: LockStep, rounding: Collection[fx.Node]) -> None:
        inner = whole.backend if isinstance(whole.backend, Emulated) else Emulated()
        self._partial = _PartialBackend(inner, rounding)
        self._rounding = rounding
        super().__init__(whole.program, whole.placed, self._partial, whole.device)

    def _rounds(self, step: Step) -> bool:
        return self._partial.rounds(step)

    def _input(self, node: fx.Node, tensor: torch.Tensor, place: Placeholder) -> Pair:
        return self._unless_rounded(node, super()._input(node, tensor, place))

    def _weight(self, node: fx.Node, place: Placeholder) -> Pair:
        return self._unless_rounded(node, super()._weight(node, place))

    def _unless_rounded(self, node: fx.Node, pair: Pair) -> Pair:
        if node in self._rounding or pair[0] is pair[1]:
            return pair
        return pair[0], pair[0].clone() if node in self.program.written else pair[0]
