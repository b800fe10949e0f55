"""Traces the author's own ways back, at the end of a model's trace: backwards of functions, and hooks.

The gradients that they are given are unknown tensors, and all that they do to them is recorded as it is on
the way forward: by the same tracer, with values of the forward pass where these were saved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ampaudit.trace.backward.calls import FunctionApplication, TensorHook
from ampaudit.trace.backward.marks import (
    BACKWARD_END,
    BACKWARD_START,
    FUNCTION_INPUTS,
    FUNCTION_OUTPUTS,
    TENSOR_HOOK,
)
from ampaudit.trace.failure import failing_line, plain_reason
from ampaudit.trace.graph import CustomBackward
from ampaudit.trace.internals import FakeTensor

__all__ = ["BackwardTracer", "Tracked", "reached_outputs"]


class BackwardTracer:
    """Remembers what has a way back of its own while a model is traced, and traces it in the end.

    Args:
        follow: whether to trace; if not, each is one that could not be followed.
    """

    def __init__(self, follow: bool = True) -> None:
        self.follow = follow
        self.tracing = False
        self.found: list[FunctionApplication | TensorHook] = []
        self.ways: list[CustomBackward] = []

    def enter(self, function: Any, args: tuple[Any, ...], layer: str) -> FunctionApplication:
        """A function is about to be called."""
        made = FunctionApplication(len(self.found), layer, function, args)
        FUNCTION_INPUTS(made.inputs, made.number)
        self.found.append(made)
        return made

    def leave(self, application: FunctionApplication, result: Any) -> None:
        """It has returned; where nothing of it has a gradient, it is forgotten."""
        made = application
        made.outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
        made.places = tuple(
            i for i, out in enumerate(made.outputs) if isinstance(out, torch.Tensor) and out.requires_grad
        )
        for place in made.places:
            node: Any = made.outputs[place].grad_fn
            if isinstance(node, BackwardCFunction) and type(node) is made.function._backward_cls:
                made.context = node
        FUNCTION_OUTPUTS([made.outputs[place] for place in made.places], made.number)

    def hook(self, value: torch.Tensor, function: Callable[..., Any], layer: str) -> RemovableHandle:
        """A tensor's gradient will go through a hook."""
        made = TensorHook(len(self.found), layer, value)
        TENSOR_HOOK([value], made.number)
        self.found.append(made)
        return made.hooks.added(function)

    def trace(
        self,
        loss: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        within: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Trace all ways back, the last one first, as autograd goes through them.

        Args:
            loss: where the way back begins.
            parameters: leaves, to which a backward may add gradients.
            within: what to be in while one is traced, by the name of its layer and its own.
        """
        self.tracing = True
        try:
            with torch.no_grad():
                self._trace(reached_outputs(loss), parameters, within)
        finally:
            self.tracing = False

    def _trace(
        self,
        reached: Mapping[int, frozenset[int]],
        parameters: Sequence[torch.Tensor],
        within: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        for item in reversed(self.found):
            if isinstance(item, FunctionApplication) and item.context is None:
                continue  # nothing of it asks for a gradient
            failure, line = None, None
            BACKWARD_START(item.inputs[:1], item.number)
            with within(f"{item.layer}/{item.name}" if item.layer else item.name):
                made, leaves = self._traced(item, reached, parameters)
            if isinstance(made, Exception):
                failure, line = plain_reason(made), failing_line(made.__traceback__)
                made, leaves = [], []
            BACKWARD_END(made, leaves, item.number)
            self.ways.append(
                CustomBackward(item.number, item.name, item.layer, line or item.source, failure, item.call)
            )

    def _traced(
        self,
        item: FunctionApplication | TensorHook,
        reached: Mapping[int, frozenset[int]],
        parameters: Sequence[torch.Tensor],
    ) -> tuple[Any, list[torch.Tensor]]:
        """The gradients that it makes, those of leaves last, and these leaves; or why there are none."""
        if not self.follow:
            return RuntimeError("torch.export cannot record it"), []
        if isinstance(item, FunctionApplication) and not item.dirty and id(item.context) not in reached:
            return RuntimeError("autograd does not reach it from the loss"), []
        try:
            made: list[torch.Tensor | None] = item.returned(reached)
            leaves = [parameter for parameter in parameters if parameter.grad is not None]
            return [*made, *(leaf.grad for leaf in leaves)], leaves
        except Exception as error:  # whatever the author's code raises on tensors without values
            return error, []
        finally:
            for parameter in parameters:
                parameter.grad = None


def reached_outputs(loss: torch.Tensor) -> dict[int, frozenset[int]]:
    """For each node behind a value, by identity, which of its outputs get a gradient."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for node in _behind(loss):
        for following, index in node.next_functions:
            if following is not None:
                found[id(following)].add(index)
    if loss.grad_fn is not None:
        found[id(loss.grad_fn)].add(loss.output_nr)
    return {key: frozenset(indices) for key, indices in found.items()}


def _behind(*values: torch.Tensor) -> list[Any]:
    """Every node of autograd's graph behind some values; it is alive as long as the list is."""
    waiting: list[Any] = [value.grad_fn for value in values if value.grad_fn is not None]
    seen: dict[int, Any] = {}
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            waiting += [following for following, _ in node.next_functions if following is not None]
    return list(seen.values())


class Tracked:
    """Tells which value of a trace a tensor is that autograd hands out: one object more for the same memory.

    Args:
        tensors: the values of the trace; a mapping, of which tensors are the keys.
    """

    def __init__(self, tensors: Mapping[torch.Tensor, Any]) -> None:
        self._tensors = tensors
        self._known: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        """Arguments of an op, with values of the trace in the place of tensors that it does not know."""
        return pytree.tree_map_only(torch.Tensor, self._value, value)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor in self._tensors or not isinstance(tensor, FakeTensor):
            return tensor
        if _memory(tensor) not in self._known:
            self._known = {_memory(known): known for known in self._tensors}
        return self._known.get(_memory(tensor), tensor)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    where = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *where, tuple(tensor.shape), tensor.stride(), tensor.dtype
