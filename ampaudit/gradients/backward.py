"""Goes back through a taped run, FP32 and 16 bits side by side, one op's derivative at a time."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import fx

from ampaudit.gradients.product import vector_jacobian
from ampaudit.gradients.tape import Tape, Taped
from ampaudit.run.backends import Backend, Reference
from ampaudit.run.step import LOWER, Step

__all__ = ["Backward", "GradientWatch", "Gradients"]

GradientPair = tuple[torch.Tensor, torch.Tensor]


class GradientWatch(Protocol):
    """Sees gradients as they are made; what is returned goes on in the 16-bit run."""

    def made(
        self, step: Step, of: fx.Node, out: Sequence[GradientPair | None], pair: GradientPair
    ) -> torch.Tensor:
        """An op's backward made its share of the gradient of ``of``, from the gradients ``out``."""

    def complete(self, node: fx.Node, dtype: torch.dtype | None, pair: GradientPair) -> torch.Tensor:
        """The gradient of a node's value is complete: all shares have been added up."""


@dataclass(slots=True)
class Gradients:
    """Gradients on their way: of each node, by the number of its output."""

    pairs: dict[fx.Node, dict[int, GradientPair]] = field(default_factory=dict)

    def take(self, node: fx.Node, count: int) -> list[GradientPair | None]:
        """What has arrived for a node's outputs."""
        arrived = self.pairs.pop(node, {})
        return [arrived.get(index) for index in range(count)]

    def add(
        self, node: fx.Node, index: int, pair: GradientPair, rounding: torch.dtype | None, backend: Backend
    ) -> None:
        """Add a share; the sum of two is rounded as the format does."""
        arrived = self.pairs.setdefault(node, {})
        if index not in arrived:
            arrived[index] = pair
            return
        before = arrived[index]
        reference = before[0] + pair[0]
        same = before[0] is before[1] and pair[0] is pair[1]
        value = reference if same else backend.hold(before[1] + pair[1], rounding)
        arrived[index] = (reference, value)


class Backward:
    """The way back through one tape.

    Args:
        tape: of the run.
        needed: nodes that a gradient is for.
        dtypes: of each node's outputs in the converted model.
        backend: how the 16-bit run computes.
    """

    def __init__(
        self,
        tape: Tape,
        needed: frozenset[fx.Node],
        dtypes: dict[fx.Node, tuple[torch.dtype | None, ...]],
        backend: Backend,
    ) -> None:
        self._tape = tape
        self._needed = needed
        self._dtypes = dtypes
        self._backend = backend
        self._reference = Reference()

    def run(self, loss: fx.Node, seed: GradientPair, watch: GradientWatch) -> None:
        """From the loss, whose gradient is the seed, to the parameters."""
        gradients = Gradients()
        gradients.pairs[loss] = {0: seed}
        for taped in reversed(self._tape.steps):
            self._step(taped, gradients, watch)
        for node in list(gradients.pairs):
            self._complete(node, gradients.take(node, 1), watch)

    def _step(self, taped: Taped, gradients: Gradients, watch: GradientWatch) -> None:
        node = taped.step.node
        arrived = gradients.take(node, len(taped.step.dtypes))
        if not any(arrived):
            return
        if taped.step.target is operator.getitem:
            source, index = node.args
            pair = arrived[0]
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            assert pair is not None
            pair = (pair[0], watch.complete(node, taped.step.dtypes[0], pair))
            gradients.add(source, index, pair, taped.step.dtypes[0], self._backend)
            return
        out = self._complete(node, arrived, watch)
        for used, made in self._products(taped, out):
            pair = (made[0], watch.made(taped.step, used, out, made))
            gradients.add(used, 0, pair, self._dtypes[used][0], self._backend)

    def _complete(
        self, node: fx.Node, arrived: list[GradientPair | None], watch: GradientWatch
    ) -> list[GradientPair | None]:
        if len(arrived) > 1:  # each was complete at the getitem that shows it
            return arrived
        return [
            None if pair is None else (pair[0], watch.complete(node, dtype, pair))
            for pair, dtype in zip(arrived, self._dtypes[node], strict=True)
        ]

    def _products(
        self, taped: Taped, out: list[GradientPair | None]
    ) -> Iterator[tuple[fx.Node, GradientPair]]:
        wanted = [
            node
            for node in dict.fromkeys(taped.step.node.all_input_nodes)
            if node in self._needed and isinstance(taped.inputs[node][0], torch.Tensor)
        ]
        if not wanted:
            return
        first = [None if pair is None else pair[0] for pair in out]
        second = [None if pair is None else pair[1] for pair in out]
        references = vector_jacobian(taped, 0, self._reference, wanted, first)
        same = taped.shared and all(a is b for a, b in zip(first, second, strict=True))
        if same and not any(self._dtypes[node][0] in LOWER for node in wanted):
            values = references
        else:
            values = vector_jacobian(taped, 1, self._backend, wanted, second)
        for node, reference, value in zip(wanted, references, values, strict=True):
            if reference is not None and value is not None:
                if value is not reference:
                    # what the formulas and autograd hand on may be the reference's own memory, too
                    given = (*second, *first, reference, *values[: wanted.index(node)])
                    value = self._backend.held_result(value, self._dtypes[node][0], given)
                yield node, (reference, value)
