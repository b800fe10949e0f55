"""Runs a program with some values in float32 and the others in 16 bits, without tracing it again."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ampaudit.run.backends import Emulated, Float32Backend
from ampaudit.run.lockstep import LockStep
from ampaudit.run.measure import BlockMeasure
from ampaudit.run.observer import Pair
from ampaudit.run.sensitivity.precision_graph import ValueKind, ValueNames
from ampaudit.run.step import Step
from ampaudit.trace.graph import Placeholder

__all__ = ["MixedRun"]


class _MixedBackend(Emulated):
    """A backend whose 16-bit ops round what they read from float32.

    Args:
        names: of the program's values.
        wide: the values in float32.
        dtype: the 16-bit format.
    """

    name = "mixed"

    def __init__(self, names: ValueNames, wide: Collection[str], dtype: torch.dtype) -> None:
        self._exact = Float32Backend()
        self._dtype = dtype
        self._reads = {
            node: frozenset(source for source in names.sources.get(node, ()) if names.of[source] in wide)
            for node in names.made
            if names.of[node] not in wide
        }

    def rounds(self, step: Step) -> bool:
        """Return whether the op is in 16 bits."""
        return step.node in self._reads

    def arguments(self, step: Step) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return super().arguments(step) if self.rounds(step) else self._exact.arguments(step)

    def call(
        self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], measure: BlockMeasure | None = None
    ) -> Any:
        if not self.rounds(step):
            return self._exact.call(step, args, kwargs)
        if exposed := self._reads[step.node]:
            template = pytree.tree_leaves((step.wide_args, step.wide_kwargs))
            values, structure = pytree.tree_flatten((args, kwargs))
            given = [
                self.represent(value, self._dtype)
                if node in exposed and isinstance(value, torch.Tensor)
                else value
                for node, value in zip(template, values, strict=True)
            ]
            args, kwargs = pytree.tree_unflatten(given, structure)
        return super().call(step, args, kwargs, measure)


class MixedRun(LockStep):
    """The converted half of a lock-step run, with a choice of values in float32.

    Args:
        whole: the executor of the program.
        names: of its values.
        wide: the values that are in float32.
        dtype: the 16-bit format.
    """

    def __init__(self, whole: LockStep, names: ValueNames, wide: Collection[str], dtype: torch.dtype) -> None:
        stored = (n for n in names.made if names.graph.values[names.of[n]].kind is ValueKind.WEIGHT)
        self._stored = {node: names.of[node] in wide for node in stored}
        self._dtype = dtype
        backend = _MixedBackend(names, wide, dtype)
        super().__init__(whole.program, whole.placed, backend, whole.device, converted_only=True)

    def _weight(self, node: fx.Node, place: Placeholder) -> Pair:
        if node not in self._stored:
            return super()._weight(node, place)
        exact = self._reference_weight(node)
        return exact, exact if self._stored[node] else self.backend.represent(exact, self._dtype)
