"""Differentiates FP32's gradients by the values of the forward pass and by gradients of the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from ampaudit.run.backward.tape import TapeEntry
from ampaudit.run.device import restore_random_state
from ampaudit.run.observer import resolved
from ampaudit.run.sensitivity.error_tape import ErrorTape
from ampaudit.run.sensitivity.gradient_errors import GradientErrors
from ampaudit.run.sensitivity.precision_graph import ValueNames
from ampaudit.run.sensitivity.probe import DifferentiableBackend, ErrorCollector
from ampaudit.run.sensitivity.record import BackwardKind, Collected
from ampaudit.run.step import Step
from ampaudit.trace.functional import DETACH_OPS
from ampaudit.trace.marks import is_mark

__all__ = ["DoubleBackward"]


class _Erring(NamedTuple):
    """A value whose gradient has an error, or that gradient; the op that makes it; and why."""

    op: fx.Node
    kind: BackwardKind
    tensor: torch.Tensor
    error: torch.Tensor


class DoubleBackward:
    """FP32's forward and backward pass as one graph of autograd.

    Args:
        tape: of the forward pass, with its errors.
        errors: of the backward pass.
        loss: the node that is differentiated.
        scale: the loss scale.
        parameters: by placeholder of a trainable parameter, the parameter.
    """

    def __init__(
        self,
        tape: ErrorTape,
        errors: GradientErrors,
        loss: fx.Node,
        scale: float,
        parameters: Mapping[fx.Node, int],
    ) -> None:
        self._tape = tape
        self._backend = DifferentiableBackend()
        self._values: dict[fx.Node, Any] = {}
        self._reads: dict[tuple[fx.Node, fx.Node], torch.Tensor] = {}
        for entry in tape.steps:
            if not is_mark(entry.step.target):
                self._forward(entry)
        self._differentiate(self._values[loss] * scale, errors, parameters)

    def _differentiate(
        self, loss: torch.Tensor, errors: GradientErrors, parameters: Mapping[fx.Node, int]
    ) -> None:
        """Run the backward pass, and keep the gradients in which there are errors."""
        reads, values = self._reads, self._values
        made: list[_Erring] = [
            *(_Erring(key[0], "gradient", reads[key], e) for key, e in errors.shares.items() if key in reads),
            *(_Erring(key[0], "jump", reads[key], e) for key, e in errors.jumps.items() if key in reads),
            *(
                _Erring(node, "gradient", values[node], e)
                for node, e in errors.sums.items()
                if _has_gradient(values.get(node))
            ),
        ]
        ends = [node for node in parameters if node in values]
        of = [*(erring.tensor for erring in made), *(values[node] for node in ends)]
        # autograd returns what its backward pass goes on with, so it can be differentiated by that
        found = torch.autograd.grad(loss, of, create_graph=True, allow_unused=True)
        known = [gradient if _has_gradient(gradient) else None for gradient in found]
        self._made = [
            erring._replace(tensor=gradient)
            for erring, gradient in zip(made, known[: len(made)], strict=True)
            if gradient is not None
        ]
        pairs = zip(ends, known[len(made) :], strict=True)
        self._gradients = {node: gradient for node, gradient in pairs if gradient is not None}

    def _forward(self, entry: TapeEntry) -> None:
        step = entry.step
        given: dict[fx.Node, Any] = {}
        for node, (reference, _) in entry.inputs.items():
            if node not in self._values:
                self._values[node] = _leaf(reference)
            value = self._values[node]
            if _has_gradient(value):  # each reader gets its own, for what rounding does to it alone
                self._reads[step.node, node] = value = value.view_as(value)
            given[node] = value, None
        self._values[step.node] = self._called(step, given, entry)

    def _called(self, step: Step, given: dict[fx.Node, Any], entry: TapeEntry) -> Any:
        passes = step.differentiable and str(step.target) not in DETACH_OPS
        args, kwargs = self._backend.arguments(step)
        args, kwargs = resolved(args, given, 0), resolved(kwargs, given, 0)
        if kwargs.get("sparse"):
            kwargs = kwargs | {"sparse": False}
        if entry.state is not None:
            devices = (value.device for value, _ in given.values() if isinstance(value, torch.Tensor))
            restore_random_state(entry.state, next(devices, torch.device("cpu")))
        with torch.set_grad_enabled(passes):
            made = self._backend.differentiable(step, args, kwargs)
        return made if passes else _leaf(made)

    def probe(self, names: ValueNames, dtype: torch.dtype, seed: Mapping[fx.Node, torch.Tensor]) -> Collected:
        """Return what each rounding adds to the error of the gradients, from random signs on them."""
        gradients = self._gradients
        if not gradients:
            return Collected({}, {}, {})
        total = torch.stack([(gradients[node] * seed[node]).sum() for node in gradients]).sum()
        collector = ErrorCollector(names, self._tape, dtype)
        values = {node: value for node, value in self._values.items() if _has_gradient(value)}
        targets = [*values.values(), *self._reads.values(), *(erring.tensor for erring in self._made)]
        found = torch.autograd.grad(total, targets, retain_graph=True, allow_unused=True)
        effects = iter(found)
        for node in values:
            if (effect := next(effects)) is not None:
                collector.complete(node, None, (effect, effect))
        steps = {entry.step.node: entry.step for entry in self._tape.steps}
        for reader, of in self._reads:
            if (effect := next(effects)) is not None:
                collector.made(steps[reader], of, (effect, effect))
        for erring in self._made:
            if (effect := next(effects)) is not None:
                collector.backward_made(erring.op, erring.kind, effect, erring.error)
        return collector.fetched()


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _leaf(value: Any) -> Any:
    """Return floating-point values as leaves."""
    if isinstance(value, torch.Tensor):
        floats = value.is_floating_point() or value.is_complex()
        return value.detach().requires_grad_() if floats else value
    return type(value)(map(_leaf, value)) if isinstance(value, list | tuple) else value
