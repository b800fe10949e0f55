"""Notices, while a model is traced, code that has a way back of its own: functions, hooks, checkpoints."""

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

from ampaudit.trace.backward.calls import FunctionApplication, Hooks
from ampaudit.trace.backward.tracer import BackwardTracer
from ampaudit.trace.internals import (
    FakeTensor,
    Replacement,
    function_apply,
    function_base,
    patched,
    recompute,
)
from ampaudit.trace.stack import is_tool_file

__all__ = ["AFTER_ACCUMULATION", "CHECKPOINT", "CustomFunctions", "custom_backwards", "tensor_attributes"]

CHECKPOINT = "checkpoint"
HOOK = "a hook on a tensor"
ON_NODES = "hooks of autograd's own nodes, such as grad_fn.register_hook, are not followed"
TWICE = "a hook inside a checkpoint runs once here; autograd may register it again when it recomputes"
AFTER_ACCUMULATION = "hooks that run once a parameter has its gradient are not followed"


@dataclass(slots=True)
class CustomFunctions:
    """What was noticed.

    Attributes:
        names: of custom functions that were called, ``checkpoint`` for recomputed activations, or of a hook.
        notes: what is known, and not followed on the way back.
    """

    names: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)


@contextmanager
def custom_backwards(ways: BackwardTracer | None, layer: Callable[[], str]) -> Iterator[CustomFunctions]:
    """While active, names are noted, and ways back are remembered where gradients will be asked for.

    Args:
        ways: what remembers them; ``None`` for a trace that goes forward only.
        layer: says in which layer the model's code is.
    """
    watch = _Watch(ways, layer)
    with patched(watch.patches()):
        yield watch.custom_functions


class _Watch:
    """What stands in the place of torch's functions; each is yielded as owner, name and replacement."""

    def __init__(self, ways: BackwardTracer | None, layer: Callable[[], str]) -> None:
        self.custom_functions = CustomFunctions()
        self._ways = ways
        self._layer = layer
        self._checkpoints = 0  # that are open
        self._running: list[FunctionApplication | None] = []  # functions whose forward is running

    def patches(self) -> Iterator[Replacement]:
        """Everything."""
        yield from self.calls()
        yield from self.hooks()
        yield from self.contexts()
        yield from tensor_attributes(lambda: self.custom_functions.notes.update({ON_NODES: None}))

    def calls(self) -> Iterator[Replacement]:

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return self._call(cls, function_apply.__get__(None, cls), args, kwargs)

        def recomputed(*args: Any, **kwargs: Any) -> Iterator[Any]:
            self.custom_functions.names[CHECKPOINT] = None
            with self._checkpoint():
                yield from recompute(*args, **kwargs)

        yield Replacement(function_base, "apply", classmethod(apply))
        yield Replacement(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", recomputed)

    def _call(self, cls: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.custom_functions.names[CHECKPOINT if cls is CheckpointFunction else cls.__name__] = None
        ways = self._ways
        asked = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        if ways is None or ways.tracing or not asked:
            return self._within(None, call, args, kwargs)
        if cls is CheckpointFunction:
            run, _preserve, *given = args
            with self._checkpoint():
                return run(*given)  # what it computes again is what it has computed
        made = ways.enter(cls, args, self._layer())
        result = self._within(made, call, args, kwargs)
        ways.leave(made, result)
        return result

    @contextmanager
    def _checkpoint(self) -> Iterator[None]:
        """Inside, code runs twice in training."""
        self._checkpoints += 1
        try:
            yield
        finally:
            self._checkpoints -= 1

    def _within(
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

    def hooks(self) -> Iterator[Replacement]:
        tensor: Any = torch.Tensor
        hook, retain, enter = tensor.register_hook, tensor.retain_grad, saved_tensors_hooks.__enter__

        def register_hook(value: torch.Tensor, function: Callable[..., Any]) -> Any:
            self.custom_functions.names[HOOK] = None
            if self._ways is None and not value.requires_grad:
                return RemovableHandle(Hooks())  # the trace goes without gradients; training does not
            if self._ways is None or self._ways.tracing or not value.requires_grad:
                return hook(value, function)
            if self._checkpoints:
                self.custom_functions.notes[TWICE] = None
            return self._ways.hook(value, function, self._layer())

        def retain_grad(value: torch.Tensor) -> None:
            if self._ways is not None or value.requires_grad:
                retain(value)

        def register_post_accumulate_grad_hook(value: torch.Tensor, function: Callable[..., Any]) -> Any:
            self.custom_functions.names[HOOK] = None
            self.custom_functions.notes[AFTER_ACCUMULATION] = None
            return RemovableHandle(Hooks())

        def entered(packing: saved_tensors_hooks) -> None:
            if type(packing) is saved_tensors_hooks:
                self.custom_functions.notes["saved_tensors_hooks: tensors are audited as they were saved"] = (
                    None
                )
            enter(packing)

        yield Replacement(tensor, "register_hook", register_hook)
        yield Replacement(tensor, "retain_grad", retain_grad)
        yield Replacement(tensor, "register_post_accumulate_grad_hook", register_post_accumulate_grad_hook)
        yield Replacement(saved_tensors_hooks, "__enter__", entered)

    def contexts(self) -> Iterator[Replacement]:
        """What a ``ctx`` is told is kept here: what C++ hands out again is no value of the trace."""
        context: Any = FunctionCtx
        save, dirty = context.save_for_backward, context.mark_dirty
        materialize, node = context.set_materialize_grads, BackwardCFunction
        saved: Any = node.saved_tensors
        after, before = node.register_hook, node.register_prehook

        def save_for_backward(ctx: Any, *tensors: Any) -> None:
            self._told(ctx, "saved", tensors)
            save(ctx, *tensors)

        def mark_dirty(ctx: Any, *args: Any) -> None:
            self._told(ctx, "dirty", bool(args))
            dirty(ctx, *args)

        def set_materialize_grads(ctx: Any, value: bool) -> None:
            self._told(ctx, "materializes", value)
            materialize(ctx, value)

        def saved_tensors(ctx: Any) -> Any:
            found = self._application(ctx)
            return saved.__get__(ctx) if found is None or found.saved is None else found.saved

        def register_hook(ctx: Any, hook: Callable[..., Any]) -> Any:
            found = self._application(ctx)
            return after(ctx, hook) if found is None else found.after.added(hook)

        def register_prehook(ctx: Any, hook: Callable[..., Any]) -> Any:
            found = self._application(ctx)
            return before(ctx, hook) if found is None else found.before.added(hook)

        yield Replacement(context, "save_for_backward", save_for_backward)
        yield Replacement(context, "mark_dirty", mark_dirty)
        yield Replacement(context, "set_materialize_grads", set_materialize_grads)
        yield Replacement(node, "saved_tensors", property(saved_tensors))
        yield Replacement(node, "register_hook", register_hook)
        yield Replacement(node, "register_prehook", register_prehook)

    def _told(self, ctx: Any, name: str, value: Any) -> None:
        application = self._running[-1] if self._running else None
        if application is not None and isinstance(ctx, BackwardCFunction):
            application.context = ctx
            setattr(application, name, value)

    def _application(self, ctx: Any) -> FunctionApplication | None:
        found = () if self._ways is None else self._ways.found
        return next((a for a in found if isinstance(a, FunctionApplication) and a.context is ctx), None)


def tensor_attributes(hooked: Callable[[], None]) -> Iterator[Replacement]:
    """What to replace while a model is traced: the owner, the name, and what by.

    Args:
        hooked: called where the model's code registers a hook on a node of autograd's.
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
        own = is_tool_file(sys._getframe(1).f_code.co_filename)
        return node if node is None or own else _Node(node, hooked)

    yield Replacement(tensor, "data", property(get_data, set_data))
    yield Replacement(tensor, "grad_fn", property(get_grad_fn))


class _Node:
    """A node of autograd's graph that tells when it gets a hook; those of custom functions tell it anyway."""

    def __init__(self, node: Any, hooked: Callable[[], None]) -> None:
        self._node = node
        self._hooked = hooked

    def __getattr__(self, name: str) -> Any:
        if name in ("register_hook", "register_prehook") and not isinstance(self._node, BackwardCFunction):
            self._hooked()
        return getattr(self._node, name)
