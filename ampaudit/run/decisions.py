"""Measures decisions: ops that turn floats into integers or booleans, where rounding can flip a choice.

Examples are topk, sort, argmax, comparisons, rounding, bucketize and casts to integers. While a model runs,
differing choices are only counted; ``DecisionDetail`` measures the margins of one op.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from ampaudit.run.observer import StepCall
from ampaudit.run.step import Step
from ampaudit.trace.functional import overload_of
from ampaudit.trace.opnames import base_name, named_arguments

__all__ = ["DecisionDetail", "DecisionStats", "differing_choices", "spacing", "with_fp32_choices"]

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_ALONG_AN_AXIS = frozenset({"topk", "sort", "argsort", "argmax", "argmin", "max", "min", "kthvalue", "mode"})


@dataclass(slots=True)
class DecisionStats:
    """The choices of one site over all batches.

    Attributes:
        elements: Number of choices.
        differing: Number of choices that differ between FP32 and 16 bits.
    """

    elements: int = 0
    differing: int = 0

    def add(self, elements: int, differing: int) -> None:
        """Add one batch."""
        self.elements += elements
        self.differing += differing


def differing_choices(reference: Any, value: Any) -> tuple[torch.Tensor, int] | None:
    """Return the number of differing choices (on their device) and of all; ``None`` if the shapes differ."""
    choices = _choices(reference, value)
    return None if choices is None else (_flipped(*choices).sum(), choices[0].numel())


def _choices(reference: Any, value: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the choices of both runs, if they can be compared."""
    first, second = _choice(reference), _choice(value)
    if first is None or second is None or first.shape != second.shape:
        return None
    return first, second


def _flipped(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return a mask of differing choices; round, floor and sign return whole numbers as floats."""
    return (first - second).abs() >= 0.5 if first.is_floating_point() else first != second


def _choice(value: Any) -> torch.Tensor | None:
    """Return the integer or boolean output of an op, or its single output."""
    if isinstance(value, torch.Tensor):
        return value
    tensors = [item for item in value if isinstance(item, torch.Tensor)] if value is not None else []
    return next((t for t in tensors if not t.is_floating_point()), None)


def with_fp32_choices(step: Step, reference: Any, value: Any, call: StepCall) -> Any:
    """Return a decision's result with FP32's choices, and the 16-bit run's values if there are any."""
    if isinstance(value, torch.Tensor):
        return reference
    scores, axis = call.args[0], _axis(step, call)
    choice = _choice(reference)
    results = []
    for first, second in zip(reference, value, strict=True):
        scored = isinstance(second, torch.Tensor) and second.is_floating_point()
        if scored and axis is not None and choice is not None and scores.ndim == choice.ndim:
            results.append(torch.gather(scores, axis, choice))
        else:
            results.append(first)
    return type(value)(results)


def _axis(step: Step, call: StepCall) -> int | None:
    """Return the axis along which a decision chooses; ``None`` for the whole tensor."""
    target = overload_of(step.target)
    if target is None:
        return None
    arguments = named_arguments(target, call.args, call.kwargs)
    default = None if base_name(target) in ("max", "min", "argmax", "argmin") else -1
    axis = arguments.get("dim", default)
    return axis if isinstance(axis, int) else None


@dataclass(slots=True)
class DecisionDetail:
    """Measures the margins of one decision.

    Attributes:
        node: Name of the node.
        differing: Number of choices that differ.
        elements: Number of choices.
        ties: Number of differing choices whose candidates are equal in 16 bits.
        margin: Median distance in FP32 between the two candidates of a differing choice.
        error: Median error of the input, for decisions without candidates (rounding, casts, buckets).
        magnitude: Median magnitude of the candidates.
    """

    node: str
    differing: int = 0
    elements: int = 0
    ties: int = 0
    margin: float | None = None
    error: float | None = None
    magnitude: float | None = None

    def inspect(self, step: Step, reference: Any, value: Any, call: StepCall) -> None:
        """Measure the margins of the node's choices."""
        choices = _choices(reference, value)
        if choices is None:
            return
        first, second = choices
        self.elements = first.numel()
        flipped = _flipped(first, second)
        self.differing = int(flipped.sum())
        pairs = _candidates(step, first, second, call)
        if pairs is None or not self.differing:
            return
        (ours, theirs), (ours16, theirs16) = pairs
        if flipped.numel() != ours.numel():  # the choices do not correspond to candidates
            return
        flat = flipped.reshape(ours.shape)
        distance = (ours - theirs).abs()[flat].double()
        if ours16 is None:
            self.error = float(distance.median())
        else:
            self.margin = float(distance.median())
        self.magnitude = float(ours.abs()[flat].double().median())
        if ours16 is not None and theirs16 is not None:
            self.ties = int((ours16 == theirs16)[flat].sum())


Pair = tuple[torch.Tensor, torch.Tensor]


def _candidates(
    step: Step, first: torch.Tensor, second: torch.Tensor, call: StepCall
) -> tuple[Pair, tuple[torch.Tensor | None, torch.Tensor | None]] | None:
    """Return the competing values of each choice, in FP32 and in 16 bits."""
    target = overload_of(step.target)
    name = base_name(target).rstrip("_") if isinstance(target, OpOverload) else ""
    scores, scores16 = call.ref_args[0], call.args[0]
    if not isinstance(scores, torch.Tensor):
        return None
    if name in _COMPARISONS:
        other, other16 = call.ref_args[1], call.args[1]
        ours, theirs = torch.broadcast_tensors(scores, torch.as_tensor(other, device=scores.device))
        near, far = torch.broadcast_tensors(scores16, torch.as_tensor(other16, device=scores.device))
        return (ours, theirs), (near, far)
    if name in _ALONG_AN_AXIS and not first.is_floating_point():
        axis = _axis(step, call)
        if axis is None:
            scores, scores16, axis = scores.reshape(-1), scores16.reshape(-1), 0
        if first.ndim < scores.ndim or first.ndim == 0:
            first, second = first.unsqueeze(axis), second.unsqueeze(axis)
        if first.ndim != scores.ndim:
            return None
        values = [torch.gather(s, axis, i) for s in (scores, scores16) for i in (first, second)]
        return (values[0], values[1]), (values[2], values[3])
    if scores.shape == first.shape:
        return (scores, scores16.to(scores.dtype)), (None, None)
    return None


def spacing(magnitude: float, fraction_bits: int) -> float:
    """Return the distance between neighbors of a format at a magnitude."""
    return 2.0 ** (math.floor(math.log2(magnitude)) - fraction_bits) if magnitude > 0.0 else 0.0
