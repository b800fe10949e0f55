"""Books recorded losses to the steps that their forward passes belong to."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import torch

from ampaudit.core.errors import UsageError

__all__ = ["LossBook"]

_own = threading.local()  # how many nodes the books of a thread have made, as ``nodes``


class LossBook:
    """Holds the losses of a loop by step.

    A loop may record a loss before or after its backward pass, its step, or its scaler's update. A loss
    belongs to the step that ends next after its forward pass, and autograd numbers its nodes in the order in
    which it creates them: the numbers at the ends of steps tell where a forward pass lies. A number without a
    graph belongs to the step that has just ended, if autograd has recorded nothing since.
    """

    def __init__(self) -> None:
        self._values: dict[int, list[torch.Tensor | float]] = {}
        self._ends: list[int] = []  # autograd's count at the end of each step
        self._last, self._others = _count()
        self._idle = True
        self._inside = -1  # step whose loss a closure has recorded
        self.dropped = 0  # losses of batches that the loop took no step on

    @property
    def step(self) -> int:
        """The number of the current step, from 0."""
        return len(self._ends)

    def end_step(self) -> None:
        """Begin the next step."""
        self._advance()
        self._ends.append(self._last)
        self._idle = True

    @property
    def idle(self) -> bool:
        """Whether autograd has recorded nothing since the last step."""
        self._advance()
        return self._idle

    def _advance(self) -> bool:
        """Return whether autograd has recorded anything since the last call, besides the nodes of books."""
        before = self._others
        self._last, self._others = _count()
        moved = self._others != before
        self._idle &= not moved
        return moved

    def record(self, value: Any, step: int | None, *, in_closure: bool, accumulating: bool) -> None:
        """Record a loss.

        Args:
            value: a number, or a tensor with one element.
            step: of the loss; ``None`` to find it.
            in_closure: whether the optimizer is calling it: the first loss is that of the step's weights.
            accumulating: whether the last recorded loss is part of the gradients; else the loop has left its
                batch out, and so is it.

        Raises:
            UsageError: the loss is not one number, or the step's number is negative.
        """
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise UsageError(f"the loss has the shape {tuple(value.shape)}", hint="record loss.mean()")
        if step is not None and step < 0:
            raise UsageError(f"step={step}", hint="steps are numbered from 0")
        new_batch = self._advance()
        found = self._step_of(value) if step is None else step
        if in_closure:
            if self._inside == found:
                return
            self._inside = found
        elif step is None and found == self.step and new_batch and not accumulating:
            self.dropped += len(self._values.pop(found, ()))
        held = value.detach().clone() if isinstance(value, torch.Tensor) else float(value)
        self._values.setdefault(found, []).append(held)

    def _step_of(self, value: Any) -> int:
        node = value.grad_fn if isinstance(value, torch.Tensor) else None
        if node is None:
            return max(self.step - 1, 0) if self._idle else self.step
        step = bisect_left(self._ends, node._sequence_nr())
        # what was computed from a loss after its step is newer than its forward pass
        while step > 0 and not _uses_leaf(node, self._ends[step - 1]):
            step -= 1
        return step

    def losses(self) -> Iterator[tuple[bool, float | None]]:
        """Yield for each step whether a loss was recorded, and the mean; ``None`` if it is not finite."""
        for step in range(self.step):
            values = [float(value) for value in self._values.get(step, ())]
            mean = sum(values) / len(values) if values else math.nan
            yield bool(values), mean if math.isfinite(mean) else None


def _count() -> tuple[int, int]:
    """Return the number of a new node, as autograd counts those of a thread, and that without any book's."""
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = torch.zeros((), requires_grad=True).clone().grad_fn
    _own.nodes = getattr(_own, "nodes", 0) + 1
    number = int(node._sequence_nr())
    return number, number - _own.nodes


def _uses_leaf(node: Any, after: int) -> bool:
    """Return whether a graph reaches a parameter through nodes that are newer than a count."""
    pending, seen = [node], {node}
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            return True
        if node._sequence_nr() > after:
            following = {inner for inner, _ in node.next_functions if inner is not None} - seen
            seen |= following
            pending += following
    return False
