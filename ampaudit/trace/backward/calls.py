"""Describes custom backward code: a call of an autograd function, or the hooks of a tensor."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ampaudit.core.sites import SourceLine
from ampaudit.trace.flatten import OUTPUT_GRADIENT
from ampaudit.trace.graph import FunctionCall
from ampaudit.trace.internals import BackwardHookFunction
from ampaudit.trace.stack import code_line, is_tool_file

__all__ = ["FunctionApplication", "Hooks", "TensorHook"]


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
