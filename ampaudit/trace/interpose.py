"""Places a caster between the model's code and the tracer, where every op passes.

``torch.export`` records ops in ``ProxyTorchDispatchMode``, above autograd and autocast. A policy that
acts there sees whole ATen ops, the layer they belong to and their true dtypes, and the author's Python
code sees the dtypes that the policy makes. Nothing else in torch offers that place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.autograd import function as autograd_function
from torch.fx.proxy import TracerBase

from ampaudit.core.sites import SiteId
from ampaudit.policy import Decision
from ampaudit.policy.schema import Cast
from ampaudit.trace.backward.tracer import Tracked
from ampaudit.trace.caster import (
    HALF_FOURIER,
    IMPLICIT_CAST,
    MIXED_DTYPES,
    NO_KERNEL,
    TOO_LARGE,
    Caster,
)
from ampaudit.trace.entry import layer_of
from ampaudit.trace.flatten import is_mark
from ampaudit.trace.internals import (
    ProxyTorchDispatchMode,
    Replacement,
    custom_function_call,
    export_utils,
    flat_regions,
    fx_proxy,
    indexing,
    inside_transform,
    layer_tracer,
    needs_values,
    patched,
    recording_mode,
    without_autocast,
    without_pre_dispatch,
)
from ampaudit.trace.kernels import (
    is_fourier,
    record_half_fourier,
    rejected_number,
    says_no_kernel,
    takes_low_precision,
)
from ampaudit.trace.op_calls import OpCalled, functional_overload, resize_outputs
from ampaudit.trace.opnames import composite_kernel, is_composite, is_foreign
from ampaudit.trace.path.recorder import READING, PathRecorder
from ampaudit.trace.replay import INSERTED, META_KEY, OpRecord, replayed_meta, replayed_record
from ampaudit.trace.stack import ModelStack
from ampaudit.trace.twins import call_traced, twin_of
from ampaudit.trace.values import widened

Call = Callable[..., Any]
aten = torch.ops.aten
# ops that torch's tracer answers without recording them
_ANSWERED = (torch.ops.prim.device.default,)


class DispatchHook:
    """Passes each recorded op through a caster while it is installed.

    A path recorder supplies values to a trace along the path of the inputs.
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
            Replacement(fx_proxy, "CapturedTraceback", ModelStack),
            Replacement(TracerBase, "_filter_traceback_frames", lambda tracer, frames: frames),
            Replacement(autograd_function, "custom_function_call", self._call_function),
            # no mode records the steps in and out of vmap
            Replacement(export_utils, "_maybe_find_pre_dispatch_tf_mode_for_export", lambda: None),
            Replacement(indexing(), "mod_index", _index),
            Replacement(nn.Module, "_apply", _apply),
            Replacement(layer_tracer, "__init__", _start_tracer),
            Replacement(layer_tracer, "path_of_module", _path_of),
            *flat_regions(),
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
            # it asserts the dtype of an earlier trace, which the policy may change
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
    return torch.autograd.Function.apply.__func__(indexing().ModIndex, value, indices)  # type: ignore[attr-defined]


def _apply(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """Convert a module of the trace, as ``module.to(dtype)`` in the model's code does.

    Torch would swap its parameters, which it refuses for tensors that the tracer refers to.
    """
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None and (new := function(parameter)) is not parameter:
            module._parameters[name] = nn.Parameter(new, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else function(buffer)
    return module


def _start_tracer(tracer: Any, root: Any, by_torch: Call = layer_tracer.__init__) -> None:
    """Show the model's code its own modules: torch shows proxies if a module has two names."""
    by_torch(tracer, root)
    tracer.enable_attr_proxy = False


def _path_of(tracer: Any, module: nn.Module, by_torch: Call = layer_tracer.path_of_module) -> str:
    """Return the path of a module; of several, one inside the module that calls it."""
    caller = next((path for path, *_ in reversed(tracer.module_stack.values())), "")
    paths: list[str] = tracer.module_id_cache.get(id(module), [])
    return next((path for path in paths if path.startswith(f"{caller}.")), None) or by_torch(tracer, module)


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


class BelowTransforms(ProxyTorchDispatchMode):
    """Records an op inside ``torch.vmap`` as ops on whole tensors.

    Torch's own trace has the tensors of one example in it, and steps in and out of ``vmap``: a graph that
    runs as a whole, and not node by node.
    """

    def __init__(self, above: ProxyTorchDispatchMode) -> None:
        super().__init__(above.tracer, above.tracing_mode)


@dataclass(slots=True)
class OpRecorder:
    """Records one op of the model's code, and the policy's additions to it."""

    caster: Caster
    path: PathRecorder | None
    by_torch: Call  # torch's own method that records an op
    mode: ProxyTorchDispatchMode
    types: Any  # of the tensors in the call
    by_values: bool = False  # whether the last op was recorded by its values

    def trace(self, called: OpCalled) -> Any:
        """Record the op under the policy's decision, and return its result."""
        caster = self.caster
        twin = twin_of(called.op)
        if twin is None and caster.splits(called):
            parts = self._parts(called)
            if parts is not NotImplemented:
                return parts
        if replayed_meta() is INSERTED:
            return self._record(OpRecord(IMPLICIT_CAST, inserted=True), called)
        path, kind = running_layer(self.mode)
        layer = caster.backward_name or path, kind
        site = caster.site_of(called.op, layer[0], id(self.mode.tracer))
        if (edit := caster.edits.get(site)) is not None:
            called = edit(called, caster.history, self._insert)
        record, dtype = caster.decide(site, called, layer)
        changed, original_args = caster.clipped(called, record.decision)
        record = replace(record, original_args=original_args, replayed=replayed_meta())
        uncast = changed
        changed = caster.apply(record.decision, dtype, changed, self._cast, id(self.mode.tracer))
        rejection = self._rejection(changed)
        if rejection is not None:
            record = replace(record, decision=rejection)
            if rejection.reason == TOO_LARGE:  # also where the op names the dtype
                changed = OpCalled(changed.op, *widened((changed.args, changed.kwargs)))
            changed = caster.apply(rejection, dtype, changed, self._cast, id(self.mode.tracer))
        if twin is not None:
            with caster.twins.entered(twin.op, site):
                return call_traced(twin, changed, self.mode, caster.write_count)
        try:
            if caster.kernels.refuses(changed):
                raise NotImplementedError("Unsupported dtype")
            result = self._record_result(record, changed)
        except Exception as error:
            # any error of a custom op on 16 bits counts
            custom = is_foreign(changed.op) and takes_low_precision(changed)
            if not custom and not (isinstance(error, RuntimeError) and says_no_kernel(error)):
                raise
            record, changed, result = self._without_kernel(record, changed, uncast, dtype)
        caster.note(result, changed, called)
        return self._clamped(record, result)

    def _rejection(self, called: OpCalled) -> Decision | None:
        """Return the decision for an op that torch refuses to call; ``None`` if it takes its arguments."""
        # in a graph, and under a policy that changes graphs, numbers are tensors
        calls = replayed_meta() is None and self.caster.rules.file.level == "calls"
        if calls and (number := rejected_number(called)) is not None:
            why = f"torch rejects {number}: value cannot be converted without overflow"
            return Decision(Cast.FLOAT32, None, TOO_LARGE, why)
        complaint = self.caster.kernels.complaint(called)
        if complaint is None:
            return None
        return Decision(Cast.FLOAT32, None, MIXED_DTYPES, f"torch rejects these dtypes: {complaint}")

    def _parts(self, called: OpCalled) -> Any:
        """Record the ops of a composite op; ``NotImplemented`` where it refuses its dtypes as a whole."""
        try:
            kernel = called.op.decompose if is_composite(called.op) else composite_kernel(called.op)
            assert kernel is not None
            with self.mode:
                return kernel(*called.args, **called.kwargs)
        except (RuntimeError, NotImplementedError) as error:
            refused = says_no_kernel(error) or self.caster.kernels.complaint(called) is not None
            if not refused and (self.path is None or not needs_values(error)):
                raise
            return NotImplemented

    def _without_kernel(
        self, record: OpRecord, called: OpCalled, uncast: OpCalled, dtype: torch.dtype
    ) -> tuple[OpRecord, OpCalled, Any]:
        """Record an op without a 16-bit kernel here as CUDA computes it, or in float32.

        In float32 it takes its arguments as they were before the policy's casts, which are not made then.
        """
        if is_fourier(called.op):
            half = replace(record, decision=HALF_FOURIER)
            result = self._record(half, called, by=record_half_fourier)
            if result is not NotImplemented:
                return record, called, result
        record = replace(record, decision=NO_KERNEL)
        called = self.caster.apply(NO_KERNEL, dtype, uncast, self._cast, id(self.mode.tracer))
        return record, called, self._record_result(record, called)

    def _clamped(self, record: OpRecord, result: Any) -> Any:
        limit = record.decision.clamp
        if limit is None or not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        unclamped: dict[int | str, Any] = {1: -math.inf, 2: math.inf}
        clamp = replace(record, site=SiteId(f"{record.site}/clamp"), facts=None, original_args=unclamped)
        return self._record(clamp, OpCalled(aten.clamp.default, (result, -limit, limit), {}))

    def _cast(self, value: torch.Tensor, target: torch.dtype) -> Any:
        record = OpRecord(IMPLICIT_CAST, inserted=True, replayed=replayed_meta())
        if isinstance(self.mode, BelowTransforms):
            return self._record(record, OpCalled(aten._to_copy.default, (value,), {"dtype": target}))
        return self._record(record, OpCalled(aten.to.dtype, (value, target), {}))

    def _insert(self, op: OpOverload, *args: Any) -> Any:
        return self._record(OpRecord(IMPLICIT_CAST, inserted=True), OpCalled(op, args, {}))

    def _record_result(self, record: OpRecord, called: OpCalled) -> Any:
        """Record an op; one with ``out=`` becomes the functional op and a copy."""
        op = functional_overload(called.op)
        if op is None:
            return self._record(record, called)
        rest, outs, resized = resize_outputs(called)
        result = self._record(record, OpCalled(op, called.args, rest))
        results = result if isinstance(result, list | tuple) else (result,)
        write = OpRecord(record.decision, replayed=record.replayed)
        for out, value, was_resized in zip(outs, results, resized, strict=True):
            if was_resized:
                self._record(write, OpCalled(aten.resize_.default, (out, value.shape), {}))
            self._record(write, OpCalled(aten.copy_.default, (out, value), {}))
        return tuple(outs) if isinstance(result, list | tuple) else outs[0]

    def _record(self, record: OpRecord, called: OpCalled, by: Call | None = None) -> Any:
        """Record one op with torch's own method, or ``by`` another, and attach the record to its nodes."""
        replayed = replayed_record()  # a replayed op keeps its original mode
        no_grad = not torch.is_grad_enabled() or (replayed is not None and replayed.no_grad)
        last = next(iter(reversed(self.mode.tracer.graph.nodes)), None)
        self.by_values = False
        try:
            # the flags that the author's code reads must not make autocast act below the tracer
            with without_autocast():
                result = self._call(record, called, by, last)
        except Exception:
            self._drop_after(last)
            raise
        # an op with several results is followed by one node for each
        record = replace(record, no_grad=no_grad, by_values=self.by_values)
        for node in self._nodes_after(last):
            if isinstance(node.target, OpOverload):
                node.meta[META_KEY] = record
        return result

    def _nodes_after(self, last: fx.Node | None) -> list[fx.Node]:
        return list(itertools.takewhile(lambda n: n is not last, reversed(self.mode.tracer.graph.nodes)))

    def _drop_after(self, last: fx.Node | None) -> None:
        for node in self._nodes_after(last):
            self.mode.tracer.graph.erase_node(node)

    def _call(self, record: OpRecord, called: OpCalled, by: Call | None, last: fx.Node | None) -> Any:
        """Record one op, and compute its FP32 values where the trace needs values."""
        mode, path = self.mode, self.path
        try:
            if by is not None:
                result = by(mode, called)
            else:
                result = self.by_torch(mode, called.op, self.types, called.args, called.kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if path is None or not (needs_values(error) or path.runs(called)):
                raise
            self._drop_after(last)
            self.by_values = needs_values(error)
            return path.record(mode, called, record.original_args)
        if path is not None and result is not NotImplemented:
            path.values.follow(called, record.original_args, result)
            if torch.Tag.nondeterministic_seeded in called.op.tags:
                path.keep(mode, result)
        return result


def running_layer(mode: ProxyTorchDispatchMode) -> tuple[str, str]:
    """Return path and class name of the module whose forward is running."""
    return layer_of(
        (replayed_meta() or {}).get("nn_module_stack") or getattr(mode.tracer, "module_stack", {})
    )
