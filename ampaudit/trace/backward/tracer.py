"""Traces custom backwards, of autograd functions and hooks, at the end of a model's trace.

Their incoming gradients are tensors without values, and what they do to them is recorded like the forward
pass: by the same tracer, with values of the forward pass where these were saved.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ampaudit.core.sites import SourceLine
from ampaudit.trace.failure import failing_line, plain_reason
from ampaudit.trace.flatten import (
    BACKWARD_END,
    BACKWARD_START,
    FUNCTION_INPUTS,
    FUNCTION_OUTPUTS,
    OUTPUT_GRADIENT,
    TENSOR_HOOK,
)
from ampaudit.trace.graph import CustomBackward, FunctionCall
from ampaudit.trace.internals import BackwardHookFunction, FakeTensor
from ampaudit.trace.stack import code_line, is_tool_file
from ampaudit.trace.values import storage_id

__all__ = ["BackwardTracer", "FunctionApplication", "Hooks", "Tracked"]


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


class Hooks(OrderedDict[int, Callable[..., Any]]):
    """Hooks in the order of their registration, each until its handle removes it."""

    def added(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Register a hook."""
        handle = RemovableHandle(self)
        self[handle.id] = hook
        return handle


@dataclass(slots=True, eq=False)
class FunctionApplication:
    """One call of a custom autograd function.

    Attributes:
        number: Number of the call in the graph's marks.
        layer: Path of the layer that calls the function.
        function: The function's class.
        args: Arguments of the call.
        context: Its ``ctx``, which is its node in autograd's graph.
        outputs: Values that the call returned.
        differentiable: Positions of the outputs that require a gradient.
        saved: Tensors saved for the backward; ``None`` if the function saved none.
        dirty: Whether the function writes to its inputs.
        materializes: Whether missing gradients are passed as zeros.
        before: Hooks on the gradients that the backward takes.
        after: Hooks on the gradients that the backward returns.
    """

    number: int
    layer: str
    function: Any
    args: tuple[Any, ...]
    context: Any = None
    outputs: tuple[Any, ...] = ()
    differentiable: tuple[int, ...] = ()
    saved: tuple[Any, ...] | None = None
    dirty: bool = False
    materializes: bool = True
    before: Hooks = field(default_factory=Hooks)
    after: Hooks = field(default_factory=Hooks)

    @property
    def name(self) -> str:
        """The name for messages."""
        hooks = self.function is BackwardHookFunction
        return "the module's backward hook" if hooks else f"{self.function.__name__}.backward"

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors among its arguments."""
        return [arg for arg in self.args if isinstance(arg, torch.Tensor)]

    @property
    def source(self) -> SourceLine | None:
        """The line that defines its backward."""
        return _definition(self.context._get_user_fn())

    @property
    def call(self) -> FunctionCall | None:
        """How to call it on other tensors; ``None`` where it takes modules or other objects."""
        leaves = pytree.tree_leaves([arg for arg in self.args if not isinstance(arg, torch.Tensor)])
        plain = (type(None), bool, int, float, str, torch.dtype, torch.device)
        if self.dirty or not all(isinstance(leaf, plain) for leaf in leaves):
            return None
        fixed = tuple(None if isinstance(arg, torch.Tensor) else arg for arg in self.args)
        tensors = tuple(i for i, arg in enumerate(self.args) if isinstance(arg, torch.Tensor))
        return FunctionCall(self.function, fixed, tensors, self.differentiable)

    def trace_gradients(self, reached: Mapping[int, frozenset[int]]) -> list[torch.Tensor | None]:
        """Trace the backward, and return the gradients of the inputs."""
        indices = reached.get(id(self.context), frozenset(self.differentiable if self.dirty else ()))
        incoming = tuple(
            self._output_gradient(index, output, indices) for index, output in enumerate(self.outputs)
        )
        for hook in self.before.values():
            incoming = _result_or_input(hook(incoming), incoming)
        results: Any = self.context.apply(*incoming)
        results = results if isinstance(results, tuple | list) else (results,)
        tensors = [index for index, arg in enumerate(self.args) if isinstance(arg, torch.Tensor)]
        gradients = tuple(results[index] if index < len(results) else None for index in tensors)
        for hook in self.after.values():
            gradients = _result_or_input(hook(gradients, incoming), gradients)
        return [_fitting(gradient, value) for gradient, value in zip(gradients, self.inputs, strict=True)]

    def _output_gradient(self, index: int, output: Any, reached: frozenset[int]) -> torch.Tensor | None:
        if not isinstance(output, torch.Tensor):
            return None
        if index in self.differentiable and index in reached:
            gradient: torch.Tensor = OUTPUT_GRADIENT(output, self.number, self.differentiable.index(index))
            return gradient
        return (
            torch.zeros(output.shape, dtype=output.dtype, device=output.device) if self.materializes else None
        )


@dataclass(slots=True, eq=False)
class TensorHook:
    """A hook on a tensor's gradient."""

    number: int
    layer: str
    value: torch.Tensor
    hooks: Hooks = field(default_factory=Hooks)

    @property
    def name(self) -> str:
        """The name for messages."""
        return next((getattr(hook, "__qualname__", "hook") for hook in self.hooks.values()), "hook")

    @property
    def call(self) -> None:
        """Hooks are not called on their own."""

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensor."""
        return [self.value]

    @property
    def source(self) -> SourceLine | None:
        """The line that defines the hook."""
        return next((_definition(hook) for hook in self.hooks.values()), None)

    def trace_gradients(self, reached: Mapping[int, frozenset[int]]) -> list[torch.Tensor | None]:
        """Trace the hooks, and return the gradient that autograd passes on."""
        del reached
        gradient = OUTPUT_GRADIENT(self.value, self.number, 0)
        for hook in self.hooks.values():
            if _is_tool_code(hook):
                continue  # it collects gradients, or sends them elsewhere
            result = hook(gradient)
            gradient = gradient if result is None else result
        return [_fitting(gradient, self.value)]


def _definition(function: Any) -> SourceLine | None:
    code = _code(function)
    return (
        None if code is None or _is_tool_code(function) else code_line(code.co_filename, code.co_firstlineno)
    )


def _is_tool_code(function: Any) -> bool:
    code = _code(function)
    return code is not None and is_tool_file(code.co_filename)


def _code(function: Any) -> CodeType | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _result_or_input(result: Any, before: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the result of a hook, or its input if it returns nothing."""
    if result is None:
        return before
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _fitting(gradient: Any, value: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient as autograd uses it: summed over broadcast axes, in the value's dtype."""
    if gradient is None:
        return None
    total: torch.Tensor = gradient if gradient.shape == value.shape else gradient.sum_to_size(value.shape)
    return total if total.dtype == value.dtype else total.to(value.dtype)
