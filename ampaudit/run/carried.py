"""Decides what each run carries from step to step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.core.errors import InputError, ReferenceBroken, first_line
from ampaudit.run.config import NextInputs
from ampaudit.run.record import StateFault, StepObservation
from ampaudit.source.interface import Batch
from ampaudit.source.next_inputs import NEXT_INPUTS
from ampaudit.trace.entry import named_inputs, tensor_leaves
from ampaudit.trace.values import inexact

__all__ = ["Lent", "carried_inputs", "own_copy", "refuse_hidden_state"]


def own_copy(function: NextInputs) -> NextInputs:
    """Copy a function that keeps a state, but not the models that it holds.

    Raises:
        InputError: it cannot be copied.
    """
    holder = getattr(function, "__self__", function)
    modules = (value for value in getattr(holder, "__dict__", {}).values() if isinstance(value, nn.Module))
    try:
        return copy.deepcopy(function, {id(module): module for module in modules})
    except Exception as error:
        raise InputError(
            f"next_inputs cannot be copied for each run: {first_line(error)}",
            hint="pass a function, or an object whose state can be copied",
        ) from error


class Lent:
    """Lends a function copies of tensors that both runs share, since it may write to them."""

    def __init__(self, shared: set[int]) -> None:
        self._shared = shared
        self._lent: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a copy."""
        if id(tensor) not in self._shared:
            return tensor
        copied = tensor.clone()
        self._lent[id(copied)] = tensor, copied, copied._version
        return copied

    def take_back(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that a copy was made of, if nothing was written to it."""
        original, copied, version = self._lent.get(id(tensor), (tensor, tensor, tensor._version))
        return original if copied._version == version else tensor


def carried_inputs(fp32: Batch, own: Batch, call: str, record: StepObservation | None) -> Batch:
    """Return the 16-bit run's next inputs: its own floats, and FP32's integers and other values.

    With a record, broken elements are noted and replaced by FP32's, within the range of the format.

    Raises:
        InputError: the two are not alike.
        ReferenceBroken: FP32's hold NaN or infinity.
    """
    named, others = (named_inputs(side.args, side.kwargs) for side in (fp32, own))
    if [name for name, _ in named] != [name for name, _ in others]:
        raise InputError(f"{NEXT_INPUTS} returned another structure in 16 bits than in FP32 after {call}")
    made = [
        _carried_leaf(name, first, second, call, record)
        for (name, first), (_, second) in zip(named, others, strict=True)
    ]
    return Batch(*pytree.tree_unflatten(made, pytree.tree_structure((own.args, own.kwargs))))


def _carried_leaf(name: str, first: Any, second: Any, call: str, record: StepObservation | None) -> Any:
    """Return the 16-bit run's value of one input."""
    if first is second:
        return first
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        _note_choice(record, name, type(first) is not type(second) or first != second)
        return first
    if first.shape != second.shape:
        here, there = (tuple(tensor.shape) for tensor in (second, first))
        raise InputError(
            f"{NEXT_INPUTS} made {name} of shape {here} in 16 bits and {there} in FP32 after {call}",
            hint="a shape that depends on values cannot be followed in both runs",
        )
    if not (inexact(first) and inexact(second)):
        _note_choice(record, name, not torch.equal(first, second))
        return first
    if bool((first.isnan() | (first == torch.inf)).any()):
        raise ReferenceBroken(f"{NEXT_INPUTS} gives NaN or infinity in FP32 after {call}: {name}")
    if first.dtype == second.dtype and torch.equal(first, second):
        return first
    wrong = first.isfinite() & ~second.isfinite()
    if record is None or not bool(wrong.any()):
        return second
    peak = float(first[wrong].abs().amax())
    counts = int(wrong.sum()), int((wrong & second.isnan()).sum())
    record.faults.append(StateFault(name, "", None, peak, *counts, second.numel()))
    limit = torch.finfo(second.dtype).max
    repaired = first if first.is_complex() else first.clamp(-limit, limit)
    return torch.where(wrong, repaired.to(second.dtype), second)


def _note_choice(record: StepObservation | None, name: str, differs: bool) -> None:
    if record is not None and differs:
        record.flipped.append(name)


def refuse_hidden_state(first: Batch, second: Batch) -> None:
    """Raise for a function that returns something else if it is called again, as it is for each run.

    Raises:
        InputError: it does.
    """
    for one, two in zip(*(tensor_leaves(made.args, made.kwargs) for made in (first, second)), strict=False):
        wide = one.to(torch.complex128), two.to(torch.complex128)
        if one.shape != two.shape or not torch.allclose(*wide, 1e-3, equal_nan=True):
            raise InputError(
                f"{NEXT_INPUTS} returns something else when it is called again with the same arguments",
                hint="it is called for each run: keep its state in an object with __call__, of which each "
                "run has a copy, or pass the scheduler itself as next_inputs",
            )
