"""Patches torch's functions, hooks and checkpoints while a model with custom backwards is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from ampaudit.trace.backward.tracer import BackwardTracer, FunctionApplication, Hooks
from ampaudit.trace.internals import (
    FakeTensor,
    Replacement,
    function_apply,
    function_base,
    patched,
    recompute,
)
from ampaudit.trace.stack import is_tool_file

__all__ = ["AFTER_ACCUMULATION", "CHECKPOINT", "CustomCode", "watch_custom_backwards"]

CHECKPOINT = "checkpoint"
HOOK = "a hook on a tensor"
ON_NODES = "hooks of autograd's own nodes, such as grad_fn.register_hook, are not followed"
TWICE = "a hook inside a checkpoint runs once here; autograd may register it again when it recomputes"
AFTER_ACCUMULATION = "hooks that run once a parameter has its gradient are not followed"


@dataclass(slots=True)
class CustomCode:
    """The custom backward code that a model uses.

    Attributes:
        names: Custom functions that were called, ``checkpoint`` for recomputed activations, or a hook.
        notes: What the trace of the backward leaves out.
    """

    names: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)


@contextmanager
def watch_custom_backwards(tracer: BackwardTracer | None, layer: Callable[[], str]) -> Iterator[CustomCode]:
    """Record custom backward code while active, and register it with a tracer.

    Args:
        tracer: Traces custom backwards; ``None`` to trace the forward pass only.
        layer: Returns the layer whose code is running.
    """
    watch = _Watch(tracer, layer)
    with patched(watch.replacements()):
        yield watch.code


class _Watch:
    """Defines the replacements and collects their findings."""

    def __init__(self, tracer: BackwardTracer | None, layer: Callable[[], str]) -> None:
        self.code = CustomCode()
        self._tracer = tracer
        self._layer = layer
        self._open_checkpoints = 0
        self._running: list[FunctionApplication | None] = []  # functions whose forward is running

    def replacements(self) -> Iterator[Replacement]:
        """Return all replacements."""
        yield from self._function_calls()
        yield from self._tensor_hooks()
        yield from self._contexts()
        yield from _tensor_attributes(lambda: self._note(ON_NODES))

    def _note(self, text: str) -> None:
        self.code.notes[text] = None

    def _function_calls(self) -> Iterator[Replacement]:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call(cls, function_apply.__get__(None, cls), args, kwargs)

        def recomputed(*args: Any, **kwargs: Any) -> Iterator[Any]:
            self.code.names[CHECKPOINT] = None
            with self._checkpoint():
                yield from recompute(*args, **kwargs)

        yield Replacement(function_base, "apply", classmethod(apply))
        yield Replacement(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", recomputed)

    def _call(self, cls: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.code.names[CHECKPOINT if cls is CheckpointFunction else cls.__name__] = None
        tracer = self._tracer
        needs_gradient = torch.is_grad_enabled() and any(
            isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args
        )
        if cls is CheckpointFunction and needs_gradient and not (tracer is not None and tracer.tracing):
            run, _preserve, *inputs = args
            with self._checkpoint():
                return run(*inputs)  # recomputing gives the same values
        if tracer is None or tracer.tracing or not needs_gradient:
            return self._run(None, call, args, kwargs)
        application = tracer.enter(cls, args, self._layer())
        result = self._run(application, call, args, kwargs)
        tracer.leave(application, result)
        return result

    @contextmanager
    def _checkpoint(self) -> Iterator[None]:
        """Count open checkpoints, whose code runs twice in training."""
        self._open_checkpoints += 1
        try:
            yield
        finally:
            self._open_checkpoints -= 1

    def _run(
        self,
        application: FunctionApplication | None,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self._running.append(application)
        try:
            return call(*args, **kwargs)
        finally:
            self._running.pop()

    def _tensor_hooks(self) -> Iterator[Replacement]:
        tensor: Any = torch.Tensor
        hook, retain, enter = tensor.register_hook, tensor.retain_grad, saved_tensors_hooks.__enter__

        def register_hook(value: torch.Tensor, function: Callable[..., Any]) -> Any:
            self.code.names[HOOK] = None
            if self._tracer is None and not value.requires_grad:
                return RemovableHandle(Hooks())  # this trace has no gradients; training does
            if self._tracer is None or self._tracer.tracing or not value.requires_grad:
                return hook(value, function)
            if self._open_checkpoints:
                self._note(TWICE)
            return self._tracer.hook(value, function, self._layer())

        def retain_grad(value: torch.Tensor) -> None:
            if self._tracer is not None or value.requires_grad:
                retain(value)

        def register_post_accumulate_grad_hook(value: torch.Tensor, function: Callable[..., Any]) -> Any:
            self.code.names[HOOK] = None
            self._note(AFTER_ACCUMULATION)
            return RemovableHandle(Hooks())

        def entered(packing: saved_tensors_hooks) -> None:
            if type(packing) is saved_tensors_hooks:
                self._note("saved_tensors_hooks: tensors are audited as they were saved")
            enter(packing)

        yield Replacement(tensor, "register_hook", register_hook)
        yield Replacement(tensor, "retain_grad", retain_grad)
        yield Replacement(tensor, "register_post_accumulate_grad_hook", register_post_accumulate_grad_hook)
        yield Replacement(saved_tensors_hooks, "__enter__", entered)

    def _contexts(self) -> Iterator[Replacement]:
        """Record what a ``ctx`` saves, since C++ returns tensors that are no values of the trace."""
        context: Any = FunctionCtx
        save, dirty = context.save_for_backward, context.mark_dirty
        materialize, node = context.set_materialize_grads, BackwardCFunction
        saved: Any = node.saved_tensors
        after, before = node.register_hook, node.register_prehook

        def save_for_backward(ctx: Any, *tensors: Any) -> None:
            self._keep(ctx, "saved", tensors)
            save(ctx, *tensors)

        def mark_dirty(ctx: Any, *args: Any) -> None:
            self._keep(ctx, "dirty", bool(args))
            dirty(ctx, *args)

        def set_materialize_grads(ctx: Any, value: bool) -> None:
            self._keep(ctx, "materializes", value)
            materialize(ctx, value)

        def saved_tensors(ctx: Any) -> Any:
            application = self._application(ctx)
            return (
                saved.__get__(ctx) if application is None or application.saved is None else application.saved
            )

        def register_hook(ctx: Any, hook: Callable[..., Any]) -> Any:
            application = self._application(ctx)
            return after(ctx, hook) if application is None else application.after.added(hook)

        def register_prehook(ctx: Any, hook: Callable[..., Any]) -> Any:
            application = self._application(ctx)
            return before(ctx, hook) if application is None else application.before.added(hook)

        yield Replacement(context, "save_for_backward", save_for_backward)
        yield Replacement(context, "mark_dirty", mark_dirty)
        yield Replacement(context, "set_materialize_grads", set_materialize_grads)
        yield Replacement(node, "saved_tensors", property(saved_tensors))
        yield Replacement(node, "register_hook", register_hook)
        yield Replacement(node, "register_prehook", register_prehook)

    def _keep(self, ctx: Any, name: str, value: Any) -> None:
        application = self._running[-1] if self._running else None
        if application is not None and isinstance(ctx, BackwardCFunction):
            application.context = ctx
            setattr(application, name, value)

    def _application(self, ctx: Any) -> FunctionApplication | None:
        records = () if self._tracer is None else self._tracer.records
        return next((a for a in records if isinstance(a, FunctionApplication) and a.context is ctx), None)


def _tensor_attributes(hooked: Callable[[], None]) -> Iterator[Replacement]:
    """Replace ``Tensor.data``, which shares memory without an op, and ``Tensor.grad_fn``.

    Args:
        hooked: Called when the model's code registers a hook on an autograd node.
    """
    tensor: Any = torch.Tensor
    data, grad_fn = tensor.data, tensor.grad_fn

    def get_data(value: torch.Tensor) -> Any:
        return value.detach() if isinstance(value, FakeTensor) else data.__get__(value)

    def set_data(value: torch.Tensor, other: torch.Tensor) -> None:
        alike = isinstance(value, FakeTensor) and isinstance(other, FakeTensor)
        if alike and value.shape == other.shape and value.dtype == other.dtype:
            with torch.no_grad():
                value.copy_(other)
        else:
            data.__set__(value, other)

    def get_grad_fn(value: torch.Tensor) -> Any:
        node = grad_fn.__get__(value)
        from_tool = is_tool_file(sys._getframe(1).f_code.co_filename)
        return node if node is None or from_tool else _Node(node, hooked)

    yield Replacement(tensor, "data", property(get_data, set_data))
    yield Replacement(tensor, "grad_fn", property(get_grad_fn))


class _Node:
    """An autograd node that reports hooks; nodes of custom functions report theirs directly."""

    def __init__(self, node: Any, hooked: Callable[[], None]) -> None:
        self._node = node
        self._hooked = hooked

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook") and not isinstance(self._node, BackwardCFunction):
            self._hooked()
        return getattr(self._node, name)
