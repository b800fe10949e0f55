"""Places a caster between the model's code and the tracer, where every op passes.

``torch.export`` records ops in ``ProxyTorchDispatchMode``, above autograd and autocast. A policy that
acts there sees whole ATen ops, the layer they belong to and their true dtypes, and the author's Python
code sees the dtypes that the policy makes. Nothing else in torch offers that place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from traceback import StackSummary
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.autograd import function as autograd_function
from torch.fx.proxy import TracerBase

from ampaudit.trace.backward.tracer import Tracked
from ampaudit.trace.caster import Caster
from ampaudit.trace.internals import (
    ProxyTorchDispatchMode,
    Replacement,
    custom_function_call,
    export_utils,
    indexing,
    inside_transform,
    patched,
    recording_mode,
    without_autocast,
    without_pre_dispatch,
)
from ampaudit.trace.marks import is_mark
from ampaudit.trace.op_calls import OpCalled
from ampaudit.trace.op_recorder import BelowTransforms, OpRecorder, running_layer
from ampaudit.trace.path.recorder import READING, PathRecorder
from ampaudit.trace.stack import is_tool_file

__all__ = ["DispatchHook", "current_layer", "same_module"]

aten = torch.ops.aten
# ops that torch's tracer answers without recording them
_ANSWERED = (torch.ops.prim.device.default,)


class DispatchHook:
    """Passes each recorded op through a caster while it is installed.

    Args:
        caster: decides about each op.
        path: supplies values, for a trace along the path of given inputs.
    """

    def __init__(self, caster: Caster, path: PathRecorder | None = None) -> None:
        self.caster = caster
        self.path = path
        self.record = ProxyTorchDispatchMode.__torch_dispatch__  # torch's own

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace the methods of torch that record ops while active."""
        hook = self

        def dispatch(
            mode: ProxyTorchDispatchMode, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return hook._dispatch(mode, types, OpCalled(op, args, kwargs or {}))

        replacements = (
            Replacement(ProxyTorchDispatchMode, "__torch_dispatch__", dispatch),
            Replacement(TracerBase, "_filter_traceback_frames", _frames_of_the_model),
            Replacement(autograd_function, "custom_function_call", self._call_function),
            # no mode records the steps in and out of vmap
            Replacement(export_utils, "_maybe_find_pre_dispatch_tf_mode_for_export", lambda: None),
            Replacement(indexing, "mod_index", _index),
            Replacement(nn.Module, "_apply", _apply),
        )
        answering = nullcontext() if self.path is None else self.path.answering(current_layer)
        with patched(replacements), answering:
            yield

    def _dispatch(self, mode: ProxyTorchDispatchMode, types: Any, called: OpCalled) -> Any:
        op, args, kwargs = called.op, called.args, called.kwargs
        if self.caster.backward_name is not None:
            args, kwargs = Tracked(mode.tracer.tensor_tracker).of((args, kwargs))
        if mode.pre_dispatch and inside_transform() and op not in _ANSWERED:
            with self._below(mode):
                return op(*args, **kwargs)
        is_recorded = mode.pre_dispatch or isinstance(mode, BelowTransforms)
        if not isinstance(op, OpOverload) or op in _ANSWERED or not is_recorded or is_mark(op):
            return self.record(mode, op, types, args, kwargs)
        if self.path is not None and op in READING:
            return self.path.read_by(mode, op, args)
        if op is aten._assert_tensor_metadata.default:
            # it pins the dtype of the trace that made it; under a policy the dtypes are ours to say
            return None
        return OpRecorder(self.caster, self.path, self.record, mode, types).trace(OpCalled(op, args, kwargs))

    def _call_function(self, *args: Any, **kwargs: Any) -> Any:
        """Call a custom autograd function inside ``vmap``, where the tracer does not know it."""
        mode = recording_mode()
        if mode is None:
            return custom_function_call(*args, **kwargs)
        with self._below(mode), without_pre_dispatch():
            return custom_function_call(*args, **kwargs)

    @contextmanager
    def _below(self, mode: ProxyTorchDispatchMode) -> Iterator[None]:
        """Record the ops that ``vmap`` makes of an op, without the dispatcher's autocast."""
        with self.caster.in_region(self.caster.region()), without_autocast(), BelowTransforms(mode):
            yield


def _index(value: torch.Tensor, indices: list[torch.Tensor]) -> Any:
    """Index by tensors inside ``vmap`` as torch does, without recording the function as a whole."""
    return torch.autograd.Function.apply.__func__(indexing.ModIndex, value, indices)  # type: ignore[attr-defined]


def _frames_of_the_model(tracer: TracerBase, frames: StackSummary) -> StackSummary:
    """Return the frames from the first ``forward`` on, including those that torch leaves out."""
    del tracer
    start = next((i for i, frame in enumerate(frames) if frame.name == "forward"), len(frames))
    kept = [f for f in frames[start:] if f.name == "forward" or not is_tool_file(f.filename)]
    return StackSummary.from_list(kept)


def _apply(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """Convert a module of the trace, as ``module.to(dtype)`` in the model's code does.

    Torch would swap its parameters, which it refuses for tensors that the tracer refers to.
    """
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None and (made := function(parameter)) is not parameter:
            module._parameters[name] = nn.Parameter(made, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else function(buffer)
    return module


@contextmanager
def same_module() -> Iterator[None]:
    """Restore the tracer's current module afterwards, even if a called module raises."""
    mode = recording_mode()
    stack = {} if mode is None else mode.tracer.module_stack
    before = dict(stack)
    try:
        yield
    finally:
        stack.clear()
        stack.update(before)


def current_layer() -> str:
    """Return the path of the module whose forward is being traced."""
    mode = recording_mode()
    return "" if mode is None else running_layer(mode)[0]
