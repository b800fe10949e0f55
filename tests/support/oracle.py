"""What torch itself does: dtypes under real CUDA autocast (on fake tensors) and after real ``.half()``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ampaudit.trace import TracedModel
from ampaudit.trace.entry import Entry, tensor_leaves
from ampaudit.trace.flatten import flat_graph
from ampaudit.trace.internals import flat_regions, patched

OpDtype = tuple[str, str]
# casts, and ops without arithmetic that indexing and layout changes may write in more than one way
_IGNORED = tuple(
    f"aten.{name}."
    for name in (
        *("to", "_to_copy", "_assert_tensor_metadata", "lift_fresh_copy", "alias"),
        *("slice", "select", "unsqueeze", "contiguous", "reshape", "view"),
    )
)


def under_cuda_autocast(model: nn.Module, kwargs: dict[str, Any], dtype: torch.dtype) -> list[OpDtype]:
    """Ops and output dtypes of an export on fake CUDA tensors with the dispatcher's autocast on."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def on_cuda(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda", requires_grad=False
            )

    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        fake = on_cuda(tensor)
        memo[id(tensor)] = nn.Parameter(fake, False) if isinstance(tensor, nn.Parameter) else fake
    shadow = copy.deepcopy(model, memo)
    inputs = tuple(on_cuda(t) for t in tensor_leaves((), kwargs))
    contiguous = mock.patch.object(torch.Tensor, "contiguous", _contiguous)
    with torch.no_grad(), _IndexingWithoutCuda(), contiguous, cuda_autocast(dtype), patched(flat_regions()):
        program = torch.export.export(Entry(shadow, (), kwargs), inputs, strict=False)
    return _ops(flat_graph(program))


def after_half(model: nn.Module, kwargs: dict[str, Any], dtype: torch.dtype) -> list[OpDtype]:
    """Ops and output dtypes of an export of ``model.to(dtype)`` on inputs of that dtype."""
    low = copy.deepcopy(model).to(dtype)
    cast = pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, kwargs)
    with torch.no_grad(), patched(flat_regions()):
        program = torch.export.export(Entry(low, (), cast), tuple(tensor_leaves((), cast)), strict=False)
    return _ops(flat_graph(program))


def ours(traced: TracedModel) -> list[OpDtype]:
    """The same of a traced model: inserted casts, and the author's own, left out."""
    return _ops(traced.graph)


class _IndexingWithoutCuda(TorchFunctionMode):
    """``x[...]`` by ATen calls: torch's own C++ path asks for a CUDA driver, even for a fake tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            return _getitem(*args)
        if func is torch.Tensor.__invert__:
            return torch.ops.aten.bitwise_not(*args)
        if func is torch.Tensor.masked_fill and not isinstance(args[2], torch.Tensor):
            return torch.ops.aten.masked_fill.Scalar(*args)
        if func is torch.Tensor.__setitem__:
            value = args[2]
            if isinstance(args[1], torch.Tensor):
                return torch.ops.aten.index_put_(args[0], [args[1]], value)
            target = _getitem(*args[:2])
            return target.copy_(value) if isinstance(value, torch.Tensor) else target.fill_(value)
        return func(*args, **(kwargs or {}))


def _contiguous(tensor: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Any:
    return torch.ops.aten.contiguous(tensor, memory_format=memory_format)


def _getitem(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    parts = list(index) if isinstance(index, tuple) else [index]
    used = sum(p is not None and p is not Ellipsis for p in parts)
    if any(p is Ellipsis for p in parts):
        at = next(i for i, p in enumerate(parts) if p is Ellipsis)
        parts[at : at + 1] = [slice(None)] * (tensor.ndim - used)
    dimension, picked = 0, []
    for part in parts:
        if part is None:
            tensor = torch.ops.aten.unsqueeze(tensor, dimension)
        elif isinstance(part, slice):
            if part != slice(None):
                tensor = torch.ops.aten.slice(tensor, dimension, part.start, part.stop, part.step or 1)
        elif isinstance(part, torch.Tensor):
            picked += [None] * (dimension - len(picked)) + [part]
        else:
            tensor = torch.ops.aten.select(tensor, dimension, part)
            continue
        dimension += 1
    return torch.ops.aten.index(tensor, picked) if picked else tensor


def _ops(graph: fx.Graph) -> list[OpDtype]:
    found: list[OpDtype] = []
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload) or str(node.target).startswith(_IGNORED):
            continue
        values = pytree.tree_leaves(node.meta.get("val"))
        dtypes = [str(v.dtype) for v in values if isinstance(v, torch.Tensor) and v.is_floating_point()]
        if dtypes:
            found.append((str(node.target), ",".join(dtypes)))
    return found


@contextmanager
def cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_cache_enabled(False)
    # an author's own torch.autocast("cuda") switches itself off where there is no device
    available = mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False)
    bf16 = mock.patch("torch.cuda.is_bf16_supported", return_value=True)
    try:
        with available, bf16:
            yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_cache_enabled(True)
