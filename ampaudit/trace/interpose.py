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
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from ampaudit.replay import INSERTED, replayed_meta
from ampaudit.sites import SiteId
from ampaudit.trace.caster import HALF_FOURIER, IMPLICIT_CAST, META_KEY, NO_KERNEL, Call, Caster, OpRecord
from ampaudit.trace.edits import OpCalled
from ampaudit.trace.entry import layer_of
from ampaudit.trace.fourier import is_fourier, record_half_fourier
from ampaudit.trace.opnames import composite_kernel, is_composite

__all__ = ["interposed"]

# what torch says where an op has no kernel for a 16-bit format
_NO_KERNEL = re.compile(
    r"not implemented for '(Half|BFloat16)'|Unsupported dtype|[Ll]ow precision dtypes not"
)


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
        if not isinstance(op, OpOverload) or not self.pre_dispatch:
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
            return record(what, torch.ops.aten.to.dtype, value, target)

        if replayed_meta() is INSERTED:
            return record(OpRecord(IMPLICIT_CAST, inserted=True), op, *args, **kwargs)

        def emit(target: OpOverload, *call_args: Any) -> Any:
            return record(OpRecord(IMPLICIT_CAST, inserted=True), target, *call_args)

        layer = _layer(self)
        site = caster.site_of(op, layer[0], id(self.tracer))
        called = caster.edited(site, OpCalled(op, args, kwargs), emit)
        made, dtype = caster.decide(site, called, layer)
        op, args, kwargs = called.op, called.args, called.kwargs
        args, kwargs, exact = caster.clipped(op, args, kwargs, made.decision)
        made = replace(made, exact=exact, replayed=replayed_meta())
        op, args, kwargs = caster.apply(made.decision, dtype, op, args, kwargs, cast, id(self.tracer))
        try:
            result = record(made, op, *args, **kwargs)
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
                result = record(made, op, *args, **kwargs)
        caster.note(result, OpCalled(op, args, kwargs))
        limit = made.decision.clamp
        if limit is None or not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        unclamped: dict[int | str, Any] = {1: -math.inf, 2: math.inf}
        clamped = replace(made, site=SiteId(f"{made.site}/clamp"), facts=None, exact=unclamped)
        return record(clamped, torch.ops.aten.clamp.default, result, -limit, limit)

    ProxyTorchDispatchMode.__torch_dispatch__ = dispatch  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ProxyTorchDispatchMode.__torch_dispatch__ = original  # type: ignore[method-assign]


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
    before = (replayed_meta() or {}).get(META_KEY)
    return torch.is_grad_enabled() and not (isinstance(before, OpRecord) and before.no_grad)


def _layer(mode: ProxyTorchDispatchMode) -> tuple[str, str]:
    """Path and class name of the module whose forward is running."""
    return layer_of(
        (replayed_meta() or {}).get("nn_module_stack") or getattr(mode.tracer, "module_stack", {})
    )
