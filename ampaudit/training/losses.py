"""Books recorded losses to the steps that their forward passes belong to."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from ampaudit.core.errors import UsageError

__all__ = ["LossBook"]

_own = threading.local()  # how many nodes the books of a thread have made, as ``nodes``


@dataclass(slots=True)
class _Loss:
    """A loss of the current step, and what is known of its backward pass."""

    value: torch.Tensor | float
    reached: bool = False  # a backward pass went through its graph
    added: bool = False  # the gradients hold its batch's
    passed_over: bool = False  # another batch's was recorded without a backward pass in between


class LossBook:
    """Holds the losses of a loop by step.

    A loop may record a loss before or after its backward pass, its step, or its scaler's update. A loss
    belongs to the step that ends next after its forward pass, and autograd numbers its nodes in the order in
    which it creates them: the numbers at the ends of steps tell where a forward pass lies. A number without a
    graph belongs to the step that has just ended, if autograd has recorded nothing since; or if that step has
    no loss, and the loop left its first step without one until the step had ended.

    A loss is left out if its batch is in no step: no backward pass went through its graph, or, for a number,
    came before the next batch's loss; or its gradients were dropped before the step.
    """

    def __init__(self) -> None:
        self._values: dict[int, list[_Loss]] = {}
        self._ends: list[int] = []  # autograd's count at the end of each step
        self._last, self._others = _count()
        self._idle = True
        self._inside = -1  # step whose loss a closure has recorded
        self._late: bool | None = None  # whether the loop records the numbers of steps that have ended
        self._pending: list[_Loss] = []  # of the current step, without a backward pass yet
        self._gradients: dict[int, ref[torch.Tensor]] = {}  # of the current step, by parameter
        self.backwards = 0  # how often a gradient was added to
        self._after_backward = True  # whether the loop records the losses of this step after each
        self._backwards_before = [0, 0]  # that at the beginning of the step, and at the last loss
        self.dropped = 0  # losses of batches that the loop took no step on

    @property
    def step(self) -> int:
        """The number of the current step, from 0."""
        return len(self._ends)

    def end_step(self) -> None:
        """Begin the next step."""
        self._advance()
        if self.backwards > self._backwards_before[0]:  # else the gradients come from elsewhere
            self._drop(lambda loss: loss.passed_over and not loss.reached)
        self._pending.clear()
        self._gradients.clear()
        self._backwards_before = [self.backwards] * 2
        self._after_backward = True
        self._ends.append(self._last)
        self._idle = True

    def add_gradient(self, parameter: torch.Tensor, *, in_closure: bool) -> None:
        """Note that a backward pass has added to the gradient of a parameter."""
        self.backwards += 1
        gradient = parameter.grad
        if gradient is None or in_closure:
            return
        known = self._gradients.get(id(parameter))
        # with create_graph, autograd makes another tensor of a sum
        if known is not None and known() is not gradient and not gradient.requires_grad:
            self._drop(lambda loss: loss.added)
            self._gradients.clear()
        self._gradients[id(parameter)] = ref(gradient)
        for loss in self._pending:
            loss.added |= loss.reached or not loss.passed_over
        if self._pending:
            self._pending = [loss for loss in self._pending if not loss.added]

    def _drop(self, unused: Callable[[_Loss], bool]) -> None:
        """Leave out losses of the current step."""
        found = self._values.get(self.step, [])
        kept = [loss for loss in found if not unused(loss)]
        self.dropped += len(found) - len(kept)
        self._values[self.step] = kept

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

    def record(self, value: Any, step: int | None, *, in_closure: bool) -> None:
        """Record a loss.

        Args:
            value: a number, or a tensor with one element.
            step: of the loss; ``None`` to find it.
            in_closure: whether the optimizer is calling it: the first loss is that of the step's weights.

        Raises:
            UsageError: the loss is not one number, or the step's number is negative.
        """
        if isinstance(value, torch.Tensor) and value.numel() != 1:
            raise UsageError(f"the loss has the shape {tuple(value.shape)}", hint="record loss.mean()")
        if step is not None and step < 0:
            raise UsageError(f"step={step}", hint="steps are numbered from 0")
        new_batch = self._advance()
        node = value.grad_fn if isinstance(value, torch.Tensor) else None
        found = self._step_of(node) if step is None else step
        if in_closure:
            if self._inside == found:
                return
            self._inside = found
        loss = _Loss(value.detach().clone() if isinstance(value, torch.Tensor) else float(value))
        if step is None and found == self.step and not in_closure:
            self._follow(loss, node, new_batch=new_batch)
        self._values.setdefault(found, []).append(loss)

    def _follow(self, loss: _Loss, node: Any, *, new_batch: bool) -> None:
        """Follow a loss of the current step to its backward pass."""
        # it came before the loss, unless it was that of a loss which was recorded before its own
        loss.added = self._after_backward and self.backwards > self._backwards_before[1]
        self._after_backward = loss.added
        self._backwards_before[1] = self.backwards
        if loss.added:
            return
        for earlier in self._pending if new_batch else ():
            earlier.passed_over = True
        self._pending.append(loss)
        if node is not None:
            _nearest_to_leaf(node).register_prehook(lambda _: setattr(loss, "reached", True))

    def _step_of(self, node: Any) -> int:
        if node is None:
            before = self.step - 1
            if self._late is None:
                self._late = before == 0
            ended = self._idle or (self._late and not self._values.get(before))
            return max(before, 0) if ended else self.step
        step = bisect_left(self._ends, node._sequence_nr())
        # what was computed from a loss after its step is newer than its forward pass
        while step > 0 and not _uses_leaf(node, self._ends[step - 1]):
            step -= 1
        return step

    def losses(self) -> Iterator[tuple[bool, float | None]]:
        """Yield for each step whether a loss was recorded, and the mean; ``None`` if it is not finite."""
        for step in range(self.step):
            values = [float(loss.value) for loss in self._values.get(step, ())]
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


def _nearest_to_leaf(node: Any) -> Any:
    """Return a node of a graph that leads to a parameter: a loss and what is computed from it share it."""
    pending, seen = [node], {node}
    while pending:
        found = pending.pop()
        following = [inner for inner, _ in found.next_functions if inner is not None]
        if any(hasattr(inner, "variable") for inner in following):
            return found
        pending += [inner for inner in following if inner not in seen]
        seen |= set(following)
    return node
