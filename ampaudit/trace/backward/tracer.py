"""Traces custom backwards, of autograd functions and hooks, at the end of a model's trace.

Their incoming gradients are tensors without values, and what they do to them is recorded like the forward
pass: by the same tracer, with values of the forward pass where these were saved.
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
from ampaudit.trace.failure import failing_line, plain_reason
from ampaudit.trace.flatten import (
    BACKWARD_END,
    BACKWARD_START,
    FUNCTION_INPUTS,
    FUNCTION_OUTPUTS,
    TENSOR_HOOK,
)
from ampaudit.trace.graph import CustomBackward
from ampaudit.trace.internals import FakeTensor
from ampaudit.trace.values import storage_id

__all__ = ["BackwardTracer", "Tracked"]


class BackwardTracer:
    """Collects custom backwards while a model is traced, and then traces them.

    Args:
        follow: Whether to trace them; otherwise each is reported as failed.
    """

    def __init__(self, follow: bool = True) -> None:
        self.follow = follow
        self.tracing = False
        self.records: list[FunctionApplication | TensorHook] = []
        self.backwards: list[CustomBackward] = []

    def enter(self, function: Any, args: tuple[Any, ...], layer: str) -> FunctionApplication:
        """Register a call of a custom function before it runs."""
        application = FunctionApplication(len(self.records), layer, function, args)
        FUNCTION_INPUTS(application.inputs, application.number)
        self.records.append(application)
        return application

    def leave(self, application: FunctionApplication, result: Any) -> None:
        """Register what the call returned."""
        application.outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
        application.differentiable = tuple(
            index
            for index, output in enumerate(application.outputs)
            if isinstance(output, torch.Tensor) and output.requires_grad
        )
        outputs = [application.outputs[index] for index in application.differentiable]
        for output in outputs:
            node: Any = output.grad_fn
            if isinstance(node, BackwardCFunction) and type(node) is application.function._backward_cls:
                application.context = node
        FUNCTION_OUTPUTS(outputs, application.number)

    def hook(self, value: torch.Tensor, function: Callable[..., Any], layer: str) -> RemovableHandle:
        """Register a hook on a tensor's gradient."""
        item = TensorHook(len(self.records), layer, value)
        TENSOR_HOOK([value], item.number)
        self.records.append(item)
        return item.hooks.added(function)

    def trace(
        self,
        loss: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        within: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """Trace all custom backwards in the order of autograd, the last one first.

        Args:
            loss: The output that is differentiated.
            parameters: Leaves, to which a backward may add gradients.
            within: Makes the context in which to trace a backward, from its layer and name.
        """
        self.tracing = True
        try:
            with torch.no_grad():
                self._trace(_reached_outputs(loss), parameters, within)
        finally:
            self.tracing = False

    def _trace(
        self,
        reached: Mapping[int, frozenset[int]],
        parameters: Sequence[torch.Tensor],
        within: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        for item in reversed(self.records):
            if isinstance(item, FunctionApplication) and item.context is None:
                continue  # none of its inputs requires a gradient
            failure, line = None, None
            BACKWARD_START(item.inputs[:1], item.number)
            with within(f"{item.layer}/{item.name}" if item.layer else item.name):
                gradients, leaves = self._traced(item, reached, parameters)
            if isinstance(gradients, Exception):
                failure, line = plain_reason(gradients), failing_line(gradients.__traceback__)
                gradients, leaves = [], []
            BACKWARD_END(gradients, leaves, item.number)
            self.backwards.append(
                CustomBackward(item.number, item.name, item.layer, line or item.source, failure, item.call)
            )

    def _traced(
        self,
        item: FunctionApplication | TensorHook,
        reached: Mapping[int, frozenset[int]],
        parameters: Sequence[torch.Tensor],
    ) -> tuple[Any, list[torch.Tensor]]:
        """Return the gradients, those of leaves last, and these leaves; or the error."""
        if not self.follow:
            return RuntimeError("torch.export cannot record it"), []
        if isinstance(item, FunctionApplication) and not item.dirty and id(item.context) not in reached:
            return RuntimeError("autograd does not reach it from the loss"), []
        try:
            gradients: list[torch.Tensor | None] = item.trace_gradients(reached)
            leaves = [parameter for parameter in parameters if parameter.grad is not None]
            return [*gradients, *(leaf.grad for leaf in leaves)], leaves
        except Exception as error:  # the model's code may raise anything on tensors without values
            return error, []
        finally:
            for parameter in parameters:
                parameter.grad = None


def _reached_outputs(loss: torch.Tensor) -> dict[int, frozenset[int]]:
    """Map each autograd node behind a value, by identity, to its outputs with a gradient."""
    outputs: defaultdict[int, set[int]] = defaultdict(set)
    for node in _behind(loss):
        for following, index in node.next_functions:
            if following is not None:
                outputs[id(following)].add(index)
    if loss.grad_fn is not None:
        outputs[id(loss.grad_fn)].add(loss.output_nr)
    return {key: frozenset(indices) for key, indices in outputs.items()}


def _behind(*values: torch.Tensor) -> list[Any]:
    """List the autograd nodes behind some values; the list keeps them alive."""
    pending: list[Any] = [value.grad_fn for value in values if value.grad_fn is not None]
    visited: dict[int, Any] = {}
    while pending:
        node = pending.pop()
        if id(node) not in visited:
            visited[id(node)] = node
            pending += [following for following, _ in node.next_functions if following is not None]
    return list(visited.values())


class Tracked:
    """Maps tensors that autograd returns, new objects for known memory, to values of the trace.

    Args:
        tensors: A mapping whose keys are the values of the trace.
    """

    def __init__(self, tensors: Mapping[torch.Tensor, Any]) -> None:
        self._tensors = tensors
        self._known: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        """Replace tensors among an op's arguments by the corresponding values of the trace."""
        return pytree.tree_map_only(torch.Tensor, self._value, value)

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor in self._tensors or not isinstance(tensor, FakeTensor):
            return tensor
        if _memory(tensor) not in self._known:
            self._known = {_memory(value): value for value in self._tensors}
        return self._known.get(_memory(tensor), tensor)


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    where = storage_id(tensor), tensor.storage_offset()
    return *where, tuple(tensor.shape), tensor.stride(), tensor.dtype
