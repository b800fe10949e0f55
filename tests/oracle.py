"""What torch itself does: dtypes under real CUDA autocast (on fake tensors) and after real ``.half()``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from ampaudit.trace import TracedModel
from ampaudit.trace.entry import Entry, tensor_leaves
from ampaudit.trace.flatten import flat_graph

OpDtype = tuple[str, str]
_IGNORED = ("aten.to.", "aten._to_copy.", "aten._assert_tensor_metadata.", "aten.lift_fresh_copy.")


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
    with torch.no_grad(), _cuda_autocast(dtype):
        program = torch.export.export(Entry(shadow, (), kwargs), inputs, strict=False)
    return _ops(flat_graph(program))


def after_half(model: nn.Module, kwargs: dict[str, Any], dtype: torch.dtype) -> list[OpDtype]:
    """Ops and output dtypes of an export of ``model.to(dtype)`` on inputs of that dtype."""
    low = copy.deepcopy(model).to(dtype)
    cast = pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, kwargs
    )
    with torch.no_grad():
        program = torch.export.export(Entry(low, (), cast), tuple(tensor_leaves((), cast)), strict=False)
    return _ops(flat_graph(program))


def ours(traced: TracedModel) -> list[OpDtype]:
    """The same of a traced model: inserted casts, and the author's own, left out."""
    return _ops(traced.graph)


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
def _cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_cache_enabled(True)
