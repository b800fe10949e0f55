"""Runs the backward pass of a recorded run op by op, in FP32 and 16 bits side by side."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from ampaudit.run.backends import Backend, Float32Backend
from ampaudit.run.backward.custom_backward import (
    CustomBackwardRun,
    CustomBackwards,
    FaultSource,
    GradientPair,
    GradientShare,
)
from ampaudit.run.backward.tape import Tape, TapeEntry
from ampaudit.run.backward.vjp import vjp
from ampaudit.run.step import Step
from ampaudit.trace.flatten import FUNCTION_OUTPUTS, is_mark, mark_number, marked_values
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["BackwardPass", "GradientObserver", "GradientPair", "Gradients"]


class GradientObserver:
    """Observes gradients as they are computed; the 16-bit run continues with the returned value."""

    def observe_share(
        self, step: Step, of: fx.Node, pair: GradientPair, fault: FaultSource | None = None
    ) -> torch.Tensor:
        """Observe one op's share of the gradient of ``of``; ``fault`` is the op inside a custom backward."""
        del step, of, fault
        return pair[1]

    def observe_sum(self, node: fx.Node, pair: GradientPair) -> torch.Tensor:
        """Observe the sum of all shares of a node's gradient before its hooks run."""
        del node
        return pair[1]

    def observe_total(self, node: fx.Node, dtype: torch.dtype | None, pair: GradientPair) -> torch.Tensor:
        """Observe the gradient of a node's value after its hooks have run."""
        del node, dtype
        return pair[1]


@dataclass(slots=True)
class Gradients:
    """Accumulated gradients by node and output number."""

    pairs: dict[fx.Node, dict[int, GradientPair]] = field(default_factory=dict)

    def take(self, node: fx.Node, count: int) -> list[GradientPair | None]:
        """Return the accumulated gradients of a node's outputs."""
        arrived = self.pairs.pop(node, {})
        return [arrived.get(index) for index in range(count)]

    def add(
        self, node: fx.Node, index: int, pair: GradientPair, rounding: torch.dtype | None, backend: Backend
    ) -> None:
        """Add a share; the sum is rounded to the format."""
        arrived = self.pairs.setdefault(node, {})
        if index not in arrived:
            arrived[index] = pair
            return
        before = arrived[index]
        reference = before[0] + pair[0]
        same = before[0] is before[1] and pair[0] is pair[1]
        value = reference if same else backend.represent(before[1] + pair[1], rounding)
        arrived[index] = (reference, value)


class BackwardPass:
    """The backward pass through one tape.

    Args:
        tape: Tape of the run.
        needed: Nodes whose gradients are needed.
        dtypes: Dtypes of each node's outputs in the converted model.
        backend: Backend of the 16-bit run.
        customs: Custom backwards along the tape.
        reference: Backend of FP32's run.
    """

    def __init__(
        self,
        tape: Tape,
        needed: frozenset[fx.Node],
        dtypes: dict[fx.Node, tuple[torch.dtype | None, ...]],
        backend: Backend,
        customs: CustomBackwards,
        reference: Backend | None = None,
    ) -> None:
        self._customs = customs
        self._tape = tape
        self._needed = needed
        self._dtypes = dtypes
        self._backend = backend
        self._reference = reference or Float32Backend()

    def run(self, seeds: Mapping[fx.Node, GradientPair], observer: GradientObserver) -> None:
        """Run from outputs with known gradients (a loss: the loss scale) to the parameters."""
        gradients = Gradients()
        gradients.pairs.update({node: {0: seed} for node, seed in seeds.items()})
        self._custom = CustomBackwardRun(self._customs, self._tape)
        for entry in reversed(self._tape.steps):
            self._step(entry, gradients, observer)
        for node in list(gradients.pairs):
            self._complete(node, gradients.take(node, 1), observer)

    def _step(self, entry: TapeEntry, gradients: Gradients, observer: GradientObserver) -> None:
        node = entry.step.node
        if is_mark(entry.step.target):
            if entry.step.target is FUNCTION_OUTPUTS:
                self._through_function(entry, gradients, observer)
            return
        arrived = gradients.take(node, len(entry.step.dtypes))
        if not any(arrived):
            return
        if entry.step.target is operator.getitem:
            source, index = node.args
            pair = arrived[0]
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            assert pair is not None
            pair = self._completed(node, entry.step.dtypes[0], pair, observer)
            gradients.add(source, index, pair, entry.step.dtypes[0], self._backend)
            return
        out = self._complete(node, arrived, observer)
        for used, share in self._products(entry, out):
            pair = (share[0], observer.observe_share(entry.step, used, share))
            gradients.add(used, 0, pair, self._dtypes[used][0], self._backend)

    def _complete(
        self, node: fx.Node, arrived: list[GradientPair | None], observer: GradientObserver
    ) -> list[GradientPair | None]:
        if len(arrived) > 1:  # each was observed at its getitem
            return arrived
        return [
            None if pair is None else self._completed(node, dtype, pair, observer)
            for pair, dtype in zip(arrived, self._dtypes[node], strict=True)
        ]

    def _completed(
        self, node: fx.Node, dtype: torch.dtype | None, pair: GradientPair, observer: GradientObserver
    ) -> GradientPair:
        pair = (pair[0], observer.observe_sum(node, pair))
        for step, number in self._custom.hooks.get(node, ()):
            for share in self._custom.run(number, [pair]):
                stored = self._as_stored(share)
                pair = (stored[0], observer.observe_share(step, node, stored, share.fault))
        return pair[0], observer.observe_total(node, dtype, pair)

    def _through_function(self, entry: TapeEntry, gradients: Gradients, observer: GradientObserver) -> None:
        """Compute the gradients of a custom function's inputs with its own backward."""
        out = [
            self._complete(node, gradients.take(node, 1), observer)[0]
            for node in marked_values(entry.step.node)
        ]
        if not any(out):
            return
        for share in self._custom.run(mark_number(entry.step.node), out):
            if share.node in self._needed:
                stored = self._as_stored(share)
                pair = (stored[0], observer.observe_share(entry.step, share.node, stored, share.fault))
                gradients.add(share.node, 0, pair, self._dtypes[share.node][0], self._backend)

    def _as_stored(self, share: GradientShare) -> GradientPair:
        """Cast a gradient to the dtype of its value, as autograd does."""
        dtype = self._dtypes[share.node][0]
        first = self._reference.represent(share.pair[0], dtype)
        return first, self._backend.represent(share.pair[1], dtype)

    def _products(
        self, entry: TapeEntry, out: list[GradientPair | None]
    ) -> Iterator[tuple[fx.Node, GradientPair]]:
        nodes = [
            node
            for node in dict.fromkeys(entry.step.node.all_input_nodes)
            if node in self._needed and isinstance(entry.inputs[node][0], torch.Tensor)
        ]
        if not nodes:
            return
        first = [None if pair is None else pair[0] for pair in out]
        second = [None if pair is None else pair[1] for pair in out]
        references = vjp(entry, 0, self._reference, nodes, first)
        same = entry.shared and all(a is b for a, b in zip(first, second, strict=True))
        if same and not any(self._dtypes[node][0] in LOW_PRECISION_DTYPES for node in nodes):
            values = references
        else:
            values = vjp(entry, 1, self._backend, nodes, second)
        for node, reference, value in zip(nodes, references, values, strict=True):
            if reference is None or value is None:
                continue
            if value is not reference:
                # results of formulas and of autograd may share the reference's memory
                sources = (*second, *first, reference, *values[: nodes.index(node)])
                value = self._backend.represented_result(value, self._dtypes[node][0], sources)
            yield node, (reference, value)
