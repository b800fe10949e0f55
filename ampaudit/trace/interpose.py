"""Puts a caster between the model's code and the tracer, at the one point that every op passes.

``torch.export`` records ops in ``ProxyTorchDispatchMode``, above autograd and autocast. A policy that
acts there sees whole ATen ops, the layer they belong to and their true dtypes, and the author's Python
code sees the dtypes that the policy makes. Nothing else in torch offers that place, so this module
replaces one method for the time of a trace; no other module touches torch's internals this way.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from traceback import StackSummary
from typing import Any
from unittest import mock

import torch
import torch._export.utils
from torch._dynamo import _trace_wrapped_higher_order_op as indexing
from torch._functorch.autograd_function import custom_function_call
from torch._ops import OpOverload
from torch.autograd import function as autograd_function
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.proxy import TracerBase

from ampaudit.core.sites import SiteId
from ampaudit.trace.backward.marks import is_mark
from ampaudit.trace.backward.tracer import Tracked
from ampaudit.trace.caster import HALF_FOURIER, IMPLICIT_CAST, NO_KERNEL, Call, Caster
from ampaudit.trace.edits import OpCalled
from ampaudit.trace.entry import layer_of
from ampaudit.trace.fourier import is_fourier, record_half_fourier
from ampaudit.trace.op_calls import returning, written_into
from ampaudit.trace.opnames import composite_kernel, is_composite
from ampaudit.trace.replay import INSERTED, META_KEY, OpRecord, replayed_meta, replayed_record
from ampaudit.trace.stack import is_tool_file

__all__ = ["current_layer", "interposed", "same_module"]

# what torch says where an op has no kernel for a 16-bit format
_NO_KERNEL = re.compile(
    r"not implemented for '(Half|BFloat16)'|Unsupported dtype|[Ll]ow precision dtypes not"
)


class _BelowTransforms(ProxyTorchDispatchMode):
    """Records what an op inside ``torch.vmap`` comes down to, as ops on whole tensors.

    Torch's own trace has the tensors of one example in it, and steps in and out of ``vmap``: a graph that
    runs as a whole, and not node by node.
    """

    def __init__(self, above: ProxyTorchDispatchMode) -> None:
        super().__init__(above.tracer, above.tracing_mode)


@contextmanager
def _below(mode: ProxyTorchDispatchMode, caster: Caster) -> Iterator[None]:
    """While active, what ``vmap`` makes of an op is recorded, without the dispatcher's autocast."""
    with caster.in_region(caster.region()), torch._C._DisableAutocast(), _BelowTransforms(mode):
        yield


@contextmanager
def _without_pre_dispatch() -> Iterator[None]:
    """A custom autograd function inside ``vmap`` is no op that the tracer above knows."""
    key = torch._C.DispatchKey.PreDispatch
    included = torch._C._dispatch_tls_local_include_set().remove(key)
    excluded = torch._C._dispatch_tls_local_exclude_set() | torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


def _nothing() -> None:
    """There is no mode that would record the steps in and out of ``vmap``."""


def _index(value: torch.Tensor, indices: list[torch.Tensor]) -> Any:
    """Torch's way to index by tensors inside ``vmap``, without its record of the whole function."""
    return torch.autograd.Function.apply.__func__(indexing.ModIndex, value, indices)  # type: ignore[attr-defined]


# what torch's tracer answers by itself
_ABOVE = (torch.ops.prim.device.default,)


@contextmanager
def interposed(caster: Caster) -> Iterator[None]:
    """While active, ops recorded by the tracer go through the caster."""
    original = ProxyTorchDispatchMode.__torch_dispatch__

    def dispatch(
        self: ProxyTorchDispatchMode,
        op: OpOverload,
        types: tuple[Any, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        below = isinstance(self, _BelowTransforms)
        if caster.way is not None:
            args, kwargs = Tracked(self.tracer.tensor_tracker).of((args, kwargs))
        if self.pre_dispatch and torch._C._functorch.maybe_current_level() is not None and op not in _ABOVE:
            with _below(self, caster):
                return op(*args, **kwargs)
        if not isinstance(op, OpOverload) or op in _ABOVE or not (self.pre_dispatch or below):
            return original(self, op, types, args, kwargs)
        if is_mark(op):
            return original(self, op, types, args, kwargs)
        if op is torch.ops.aten._assert_tensor_metadata.default:
            # it pins the dtype of the trace that made it; under a policy the dtypes are ours to say
            return None

        def record(
            what: OpRecord, target: OpOverload, *call_args: Any, by: Call | None = None, **call_kwargs: Any
        ) -> Any:
            # the flags that the author's code reads must not make autocast act below the tracer
            what = replace(what, no_grad=not _with_gradients())
            nodes = self.tracer.graph.nodes
            last = next(iter(reversed(nodes)), None)
            try:
                with torch._C._DisableAutocast():
                    if by is not None:
                        result = by(self, target, call_args, call_kwargs)
                    else:
                        result = original(self, target, types, call_args, call_kwargs)
            except (RuntimeError, NotImplementedError):
                for node in list(itertools.takewhile(lambda n: n is not last, reversed(nodes))):
                    self.tracer.graph.erase_node(node)
                raise
            # an op with several results is followed by one node for each
            for node in itertools.takewhile(lambda n: n is not last, reversed(nodes)):
                if isinstance(node.target, OpOverload):
                    node.meta[META_KEY] = what
            return result

        if caster.splits(op, args, kwargs):
            parts = _parts(self, op, args, kwargs)
            if parts is not NotImplemented:
                return parts

        def cast(value: torch.Tensor, target: torch.dtype) -> Any:
            what = OpRecord(IMPLICIT_CAST, inserted=True, replayed=replayed_meta())
            if below:
                return record(what, torch.ops.aten._to_copy.default, value, dtype=target)
            return record(what, torch.ops.aten.to.dtype, value, target)

        if replayed_meta() is INSERTED:
            return record(OpRecord(IMPLICIT_CAST, inserted=True), op, *args, **kwargs)

        def emit(target: OpOverload, *call_args: Any) -> Any:
            return record(OpRecord(IMPLICIT_CAST, inserted=True), target, *call_args)

        layer = caster.layer(_layer(self))
        site = caster.site_of(op, layer[0], id(self.tracer))
        called = caster.edited(site, OpCalled(op, args, kwargs), emit)
        made, dtype = caster.decide(site, called, layer)
        op, args, kwargs = called.op, called.args, called.kwargs
        args, kwargs, original_args = caster.clipped(op, args, kwargs, made.decision)
        made = replace(made, original_args=original_args, replayed=replayed_meta())
        op, args, kwargs = caster.apply(made.decision, dtype, op, args, kwargs, cast, id(self.tracer))
        try:
            result = _recorded(made, OpCalled(op, args, kwargs), record)
        except (RuntimeError, NotImplementedError) as error:
            if not _NO_KERNEL.search(str(error)):
                raise
            result = NotImplemented
            if is_fourier(op):
                half = replace(made, decision=HALF_FOURIER)
                result = record(half, op, *args, by=record_half_fourier, **kwargs)
            if result is NotImplemented:
                made = replace(made, decision=NO_KERNEL)
                op, args, kwargs = caster.apply(NO_KERNEL, dtype, op, args, kwargs, cast, id(self.tracer))
                result = _recorded(made, OpCalled(op, args, kwargs), record)
        caster.note(result, OpCalled(op, args, kwargs), called)
        limit = made.decision.clamp
        if limit is None or not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        unclamped: dict[int | str, Any] = {1: -math.inf, 2: math.inf}
        clamped = replace(made, site=SiteId(f"{made.site}/clamp"), facts=None, original_args=unclamped)
        return record(clamped, torch.ops.aten.clamp.default, result, -limit, limit)

    def custom(*args: Any, **kwargs: Any) -> Any:
        mode = _recording()
        if mode is None:
            return custom_function_call(*args, **kwargs)
        with _below(mode, caster), _without_pre_dispatch():
            return custom_function_call(*args, **kwargs)

    ProxyTorchDispatchMode.__torch_dispatch__ = dispatch  # type: ignore[method-assign, assignment]
    try:
        with (
            mock.patch.object(TracerBase, "_filter_traceback_frames", _frames_of_the_model),
            mock.patch.object(torch._export.utils, "_maybe_find_pre_dispatch_tf_mode_for_export", _nothing),
            mock.patch.object(indexing, "mod_index", _index),
            mock.patch.object(autograd_function, "custom_function_call", custom),
        ):
            yield
    finally:
        ProxyTorchDispatchMode.__torch_dispatch__ = original  # type: ignore[method-assign]


def _frames_of_the_model(tracer: TracerBase, frames: StackSummary) -> StackSummary:
    """The frames from the first ``forward`` on, functions that it calls included, which torch leaves out."""
    del tracer
    start = next((i for i, frame in enumerate(frames) if frame.name == "forward"), len(frames))
    kept = [f for f in frames[start:] if f.name == "forward" or not is_tool_file(f.filename)]
    return StackSummary.from_list(kept)


def _recorded(made: OpRecord, called: OpCalled, record: Call) -> Any:
    """What an op gives; one that writes into tensors that it is given is recorded as one that does not."""
    returns = returning(called.op)
    if returns is None:
        return record(made, called.op, *called.args, **called.kwargs)
    rest, outs, resized = written_into(called.op, called.args, called.kwargs)
    result = record(made, returns, *called.args, **rest)
    results = result if isinstance(result, list | tuple) else (result,)
    write = OpRecord(made.decision, replayed=made.replayed)
    for out, value, moved in zip(outs, results, resized, strict=True):
        if moved:
            record(write, torch.ops.aten.resize_.default, out, value.shape)
        record(write, torch.ops.aten.copy_.default, out, value)
    return tuple(outs) if isinstance(result, list | tuple) else outs[0]


def _parts(
    mode: ProxyTorchDispatchMode, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """What a composite op consists of; ``NotImplemented`` where it refuses 16 bits as a whole."""
    try:
        kernel = op.decompose if is_composite(op) else composite_kernel(op)
        assert kernel is not None
        with mode:
            return kernel(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        if not _NO_KERNEL.search(str(error)):
            raise
        return NotImplemented


def _with_gradients() -> bool:
    """Whether gradients are on here; an op that is replayed keeps what was so when it was first traced."""
    before = replayed_record()
    return torch.is_grad_enabled() and not (before is not None and before.no_grad)


def _layer(mode: ProxyTorchDispatchMode) -> tuple[str, str]:
    """Path and class name of the module whose forward is running."""
    return layer_of(
        (replayed_meta() or {}).get("nn_module_stack") or getattr(mode.tracer, "module_stack", {})
    )


def _recording() -> ProxyTorchDispatchMode | None:
    """The mode that records ops where the model's code calls them; ``None`` outside a trace."""
    mode: ProxyTorchDispatchMode | None = torch._ops._get_dispatch_mode_pre_dispatch(
        torch._C._TorchDispatchModeKey.PROXY
    )
    return mode


@contextmanager
def same_module() -> Iterator[None]:
    """Afterwards the tracer is in the module that it was in, whatever is raised in one that is called."""
    mode = _recording()
    stack = {} if mode is None else mode.tracer.module_stack
    before = dict(stack)
    try:
        yield
    finally:
        stack.clear()
        stack.update(before)


def current_layer() -> str:
    """Path of the module whose forward is being traced."""
    mode = _recording()
    return "" if mode is None else _layer(mode)[0]
