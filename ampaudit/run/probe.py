"""Looks for the cause of an error: counts flipped decisions, pins some, and finds stalled sums."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ampaudit.run.decisions import DecisionDetail, differing_choices, with_fp32_choices
from ampaudit.run.observer import Observer, StepCall
from ampaudit.run.step import Step
from ampaudit.trace.functional import overload_of
from ampaudit.trace.opnames import base_name, named_arguments

__all__ = ["Probe"]

_SUMS = frozenset({"add", "sub", "add_", "sub_", "__iadd__", "__isub__"})


@dataclass(slots=True)
class Probe(Observer):
    """Measures only what is requested.

    Attributes:
        pins: nodes of decisions that follow FP32's choices.
        detail: a decision to look at closely.
        additions: nodes to look at for additions that change nothing.
    """

    pins: frozenset[str] = frozenset()
    detail: DecisionDetail | None = None
    additions: frozenset[str] = frozenset()
    _flips: dict[str, torch.Tensor] = field(default_factory=dict)
    _before: dict[str, torch.Tensor] = field(default_factory=dict)
    _moved: int = 0
    _stalled: int = 0

    @property
    def stalled(self) -> float:
        """Return the share of additions that change the sum in FP32 but not in 16 bits."""
        return self._stalled / self._moved if self._moved else 0.0

    def flips(self) -> dict[str, int]:
        """Return the number of differing choices by node."""
        counts = torch.stack(list(self._flips.values())).tolist() if self._flips else []
        return dict(zip(self._flips, map(int, counts), strict=True))

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Count, pin or inspect decisions and sums."""
        name = step.node.name
        if step.decides and not call.shared:
            counted = differing_choices(reference, value)
            if counted is not None:
                self._flips[name] = counted[0]
            if self.detail is not None and name == self.detail.node:
                self.detail.inspect(step, reference, value, call)
            if name in self.pins:
                return with_fp32_choices(step, reference, value, call)
        if self.additions:
            self._inspect_sum(step, value, call)
        return value

    def _inspect_sum(self, step: Step, value: Any, call: StepCall) -> None:
        """Compare an in-place sum with its initial value, which was kept since it is overwritten."""
        if not isinstance(value, torch.Tensor):
            return
        if any(user.name in self.additions for user in step.node.users):
            self._before[step.node.name] = value.clone()
        if step.node.name not in self.additions or not step.node.all_input_nodes:
            return
        target = overload_of(step.target)
        if target is None:
            return
        name = base_name(target)
        if name == "cumsum":
            axis = named_arguments(target, call.args, call.kwargs)["dim"]
            added = call.ref_args[0].narrow(axis, 1, max(value.shape[axis] - 1, 0))
            self._count(added != 0, value.diff(dim=axis) == 0)
        elif name in _SUMS:
            first, second = call.ref_args[0], call.ref_args[1]
            before = self._before.get(step.node.all_input_nodes[0].name, call.args[0])
            if isinstance(first, torch.Tensor) and isinstance(before, torch.Tensor):
                moved = torch.as_tensor(second, device=value.device) != 0
                if before.shape == value.shape:
                    self._count(moved.expand(value.shape), value == before)

    def _count(self, moved: torch.Tensor, same: torch.Tensor) -> None:
        self._moved += int(moved.sum())
        self._stalled += int((moved & same).sum())
