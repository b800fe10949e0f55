"""Records one op of a model's code in the trace, with the casts that the policy decides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.core.sites import SiteId
from ampaudit.policy import Decision
from ampaudit.trace.caster import (
    HALF_FOURIER,
    IMPLICIT_CAST,
    NO_KERNEL,
    TOO_LARGE,
    Caster,
    mixed_dtypes,
    too_large,
)
from ampaudit.trace.entry import layer_of
from ampaudit.trace.fourier import is_fourier, record_half_fourier
from ampaudit.trace.internals import ProxyTorchDispatchMode, needs_values, without_autocast
from ampaudit.trace.kernels import rejected_number, says_no_kernel, takes_low_precision
from ampaudit.trace.op_calls import OpCalled, returning, written_into
from ampaudit.trace.opnames import composite_kernel, is_composite, is_foreign
from ampaudit.trace.path.recorder import PathRecorder
from ampaudit.trace.replay import INSERTED, META_KEY, OpRecord, replayed_meta, replayed_record
from ampaudit.trace.twin_call import call_traced
from ampaudit.trace.twins import twin_of
from ampaudit.trace.values import widened

__all__ = ["BelowTransforms", "OpRecorder", "running_layer"]

aten = torch.ops.aten
Call = Callable[..., Any]


class BelowTransforms(ProxyTorchDispatchMode):
    """Records an op inside ``torch.vmap`` as ops on whole tensors.

    Torch's own trace has the tensors of one example in it, and steps in and out of ``vmap``: a graph that
    runs as a whole, and not node by node.
    """

    def __init__(self, above: ProxyTorchDispatchMode) -> None:
        super().__init__(above.tracer, above.tracing_mode)


class OpRecorder:
    """Records one op of the model's code, and the policy's additions to it.

    Args:
        caster: decides about the op.
        path: supplies values, for a trace along the path of given inputs.
        by_torch: torch's own method that records an op.
        mode: the mode that it belongs to.
        types: the types of tensors in the call.
    """

    def __init__(
        self,
        caster: Caster,
        path: PathRecorder | None,
        by_torch: Call,
        mode: ProxyTorchDispatchMode,
        types: Any,
    ) -> None:
        self._caster = caster
        self._path = path
        self._by_torch = by_torch
        self._mode = mode
        self._types = types
        self._tracer_id = id(mode.tracer)
        self._by_values = False  # whether the last op was recorded by its values

    def trace(self, called: OpCalled) -> Any:
        """Record the op under the policy's decision, and return its result."""
        caster = self._caster
        twin = twin_of(called.op)
        if twin is None and caster.splits(called):
            parts = self._parts(called)
            if parts is not NotImplemented:
                return parts
        if replayed_meta() is INSERTED:
            return self._record(OpRecord(IMPLICIT_CAST, inserted=True), called)
        layer = caster.layer(running_layer(self._mode))
        site = caster.site_of(called.op, layer[0], self._tracer_id)
        called = caster.edited(site, called, self._insert)
        record, dtype = caster.decide(site, called, layer)
        changed, original_args = caster.clipped(called, record.decision)
        record = replace(record, original_args=original_args, replayed=replayed_meta())
        uncast = changed
        changed = caster.apply(record.decision, dtype, changed, self._cast, self._tracer_id)
        rejection = self._rejection(changed)
        if rejection is not None:
            record = replace(record, decision=rejection)
            if rejection.reason == TOO_LARGE:  # also where the op names the dtype
                changed = OpCalled(changed.op, *widened((changed.args, changed.kwargs)))
            changed = caster.apply(rejection, dtype, changed, self._cast, self._tracer_id)
        if twin is not None:
            with caster.twins.entered(twin.op, site):
                return call_traced(twin, changed, self._mode, caster.is_written)
        try:
            if caster.kernels.refuses(changed):
                raise NotImplementedError
            result = self._record_result(record, changed)
        except Exception as error:
            if not _lacks_kernel(changed, error):
                raise
            record, changed, result = self._without_kernel(record, changed, uncast, dtype)
        caster.note(result, changed, called)
        return self._clamped(record, result)

    def _rejection(self, called: OpCalled) -> Decision | None:
        """Return the decision for an op that torch refuses to call; ``None`` if it takes its arguments."""
        # in a graph, and under a policy that changes graphs, numbers are tensors
        calls = replayed_meta() is None and self._caster.rules.file.level == "calls"
        if calls and (number := rejected_number(called)) is not None:
            return too_large(number)
        complaint = self._caster.kernels.complaint(called)
        return None if complaint is None else mixed_dtypes(complaint)

    def _parts(self, called: OpCalled) -> Any:
        """Record the ops of a composite op; ``NotImplemented`` where it refuses its dtypes as a whole."""
        try:
            kernel = called.op.decompose if is_composite(called.op) else composite_kernel(called.op)
            assert kernel is not None
            with self._mode:
                return kernel(*called.args, **called.kwargs)
        except (RuntimeError, NotImplementedError) as error:
            refused = says_no_kernel(error) or self._caster.kernels.complaint(called) is not None
            if not refused and (self._path is None or not needs_values(error)):
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
        called = self._caster.apply(NO_KERNEL, dtype, uncast, self._cast, self._tracer_id)
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
        if isinstance(self._mode, BelowTransforms):
            return self._record(record, OpCalled(aten._to_copy.default, (value,), {"dtype": target}))
        return self._record(record, OpCalled(aten.to.dtype, (value, target), {}))

    def _insert(self, op: OpOverload, *args: Any) -> Any:
        return self._record(OpRecord(IMPLICIT_CAST, inserted=True), OpCalled(op, args, {}))

    def _record_result(self, record: OpRecord, called: OpCalled) -> Any:
        """Record an op; one with ``out=`` becomes the functional op and a copy."""
        op = returning(called.op)
        if op is None:
            return self._record(record, called)
        rest, outs, resized = written_into(called)
        result = self._record(record, OpCalled(op, called.args, rest))
        results = result if isinstance(result, list | tuple) else (result,)
        write = OpRecord(record.decision, replayed=record.replayed)
        for out, value, moved in zip(outs, results, resized, strict=True):
            if moved:
                self._record(write, OpCalled(aten.resize_.default, (out, value.shape), {}))
            self._record(write, OpCalled(aten.copy_.default, (out, value), {}))
        return tuple(outs) if isinstance(result, list | tuple) else outs[0]

    def _record(self, record: OpRecord, called: OpCalled, by: Call | None = None) -> Any:
        """Record one op with torch's own method, or ``by`` another, and attach the record to its nodes."""
        record = replace(record, no_grad=not _gradients_enabled())
        last = next(iter(reversed(self._mode.tracer.graph.nodes)), None)
        self._by_values = False
        try:
            # the flags that the author's code reads must not make autocast act below the tracer
            with without_autocast():
                result = self._call(record, called, by, last)
        except Exception:
            self._drop_after(last)
            raise
        # an op with several results is followed by one node for each
        record = replace(record, by_values=self._by_values)
        for node in self._nodes_after(last):
            if isinstance(node.target, OpOverload):
                node.meta[META_KEY] = record
        return result

    def _nodes_after(self, last: fx.Node | None) -> list[fx.Node]:
        return list(itertools.takewhile(lambda n: n is not last, reversed(self._mode.tracer.graph.nodes)))

    def _drop_after(self, last: fx.Node | None) -> None:
        for node in self._nodes_after(last):
            self._mode.tracer.graph.erase_node(node)

    def _call(self, record: OpRecord, called: OpCalled, by: Call | None, last: fx.Node | None) -> Any:
        """Record one op, and compute its FP32 values where the trace needs values."""
        mode, path = self._mode, self._path
        try:
            if by is not None:
                result = by(mode, called.op, called.args, called.kwargs)
            else:
                result = self._by_torch(mode, called.op, self._types, called.args, called.kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if path is None or not (needs_values(error) or path.runs(called)):
                raise
            self._drop_after(last)
            self._by_values = needs_values(error)
            return path.record(mode, called, record.original_args)
        if path is not None and result is not NotImplemented:
            path.values.follow(called, record.original_args, result)
            if torch.Tag.nondeterministic_seeded in called.op.tags:
                path.keep(mode, result)
        return result


def _lacks_kernel(called: OpCalled, error: Exception) -> bool:
    """Return whether an op raises for lack of a 16-bit kernel; ops from elsewhere have words of their own."""
    if isinstance(error, RuntimeError) and says_no_kernel(error):
        return True
    return is_foreign(called.op) and takes_low_precision(called)


def _gradients_enabled() -> bool:
    """Return whether gradients are enabled; a replayed op keeps its original mode."""
    replayed = replayed_record()
    return torch.is_grad_enabled() and not (replayed is not None and replayed.no_grad)


def running_layer(mode: ProxyTorchDispatchMode) -> tuple[str, str]:
    """Return path and class name of the module whose forward is running."""
    return layer_of(
        (replayed_meta() or {}).get("nn_module_stack") or getattr(mode.tracer, "module_stack", {})
    )
