"""Collects the private names of torch that tracing depends on, and patches attributes of torch.

No other module assigns to an attribute of torch, and few read a private one (tests/test_architecture.py lists
them): when a new release of torch breaks tracing, this is the place to look first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._export.utils as export_utils
import torch.fx._symbolic_trace as fx_tracing
import torch.utils.checkpoint
from torch import _subclasses, compiler
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._functorch.autograd_function import custom_function_call
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.autograd.function import _SingleLevelFunction
from torch.fx import proxy as fx_proxy
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    _ModuleStackTracer,
    disable_proxy_modes_tracing,
    fetch_object_proxy,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules import module as nn_module
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ampaudit.core.errors import text_of
from ampaudit.core.imports import TRACER

# names of torch that other modules take from here
__all__ = [
    "BackwardHookFunction",
    "DispatchKey",
    "FakeTensor",
    "FakeTensorMode",
    "ProxyTorchDispatchMode",
    "ShapeEnv",
    "TorchDispatchMode",
    "compiler",
    "custom_function_call",
    "decomposition_table",
    "disable_proxy_modes_tracing",
    "export_utils",
    "fx_proxy",
    "fx_tracing",
    "track_tensor_tree",
    "unset_fake_temporarily",
]

without_autocast: Callable[[], Any] = torch._C._DisableAutocast
without_modes: Callable[[], Any] = _disable_current_modes
without_torch_function: Callable[[], Any] = torch._C.DisableTorchFunction
# below Function.apply, which a model may hold as `swish = Swish.apply`
function_base: Any = _SingleLevelFunction
function_apply: Any = torch._C._FunctionBase.__dict__["apply"]
# graph modules whose code is generated when they are called, which those of an export never are
lazy_graph_modules: Callable[[bool], Any] = _use_lazy_graph_module
layer_tracer: Any = _ModuleStackTracer
recompute: Any = torch.utils.checkpoint._checkpoint_without_reentrant_generator
# errors of ops whose result fake tensors cannot describe, and messages of ops that read their memory
_SHAPE_UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
registered_ops: Callable[[], list[str]] = torch._C._dispatch_get_all_op_names
NO_VALUE = "a tensor of the trace has no value"
_NO_MEMORY = ("data is not allocated yet", "Cannot access data pointer", "no fake impl registered", NO_VALUE)
# hooks that every module calls
global_hooks = (nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks)
# nodes of an exported graph that enter and leave regions
region_calls = frozenset(
    (
        torch.amp.autocast_mode._enter_autocast,
        torch.amp.autocast_mode._exit_autocast,
        torch._C._set_grad_enabled,
    )
)


def export_trace() -> ModuleType:
    """Return the module with the steps of an export, which takes as long to import as the rest of torch."""
    return import_module(TRACER)


def indexing() -> Any:
    """Return the module that records indexing, which takes as long to import."""
    return import_module("torch._dynamo._trace_wrapped_higher_order_op")


class Replacement(NamedTuple):
    """An attribute of torch and its replacement."""

    owner: Any
    name: str
    value: Any


@contextmanager
def patched(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Replace attributes of torch while active, and restore them in reverse order."""
    with ExitStack() as stack:
        for owner, name, value in replacements:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def flat_regions() -> Iterator[Replacement]:
    """Yield what keeps an export from nesting the ops of each autocast and no-grad region in a graph."""
    for region in ("autocast", "set_grad"):
        name = f"replace_{region}_with_hop_pass"
        module = import_module(f"torch._export.passes.{name}")
        yield Replacement(module, name, lambda *unchanged: unchanged)


@contextmanager
def looking_up_fake_tensors(kind: type[ModuleType]) -> Iterator[None]:
    """Give the modules in which code looks up the class of fake tensors another type while active."""
    modules = (_subclasses, fake_tensor)
    try:
        for module in modules:
            module.__class__ = kind
        yield
    finally:
        for module in modules:
            module.__class__ = ModuleType


def has_kernel(op: OpOverload, key: str) -> bool:
    """Return whether a kernel is registered for a dispatch key, or an alias of several."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def inside_transform() -> bool:
    """Return whether the current code runs inside ``torch.vmap`` or another transform."""
    return torch._C._functorch.maybe_current_level() is not None


def recording_mode() -> ProxyTorchDispatchMode | None:
    """Return the mode that records the ops of the model's code; ``None`` outside a trace."""
    mode: ProxyTorchDispatchMode | None = torch._ops._get_dispatch_mode_pre_dispatch(
        torch._C._TorchDispatchModeKey.PROXY
    )
    return mode


def without_symbols(mode: FakeTensorMode) -> None:
    """Make sizes and numbers that depend on data an error of a fake mode, instead of symbols."""
    environment = mode.shape_env
    if environment is not None:
        environment.settings = dataclasses.replace(
            environment.settings, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False
        )


def needs_values(error: Exception) -> bool:
    """Return whether an op fails on fake tensors because they have no values."""
    return isinstance(error, _SHAPE_UNKNOWN) or any(text in text_of(error) for text in _NO_MEMORY)


def proxy_of(mode: ProxyTorchDispatchMode, tensor: torch.Tensor) -> Any:
    """Return the tensor's proxy in a trace, or a constant of the graph unchanged."""
    proxy = fetch_object_proxy(mode.tracer, tensor)
    return proxy if isinstance(proxy, torch.Tensor) else proxy.proxy


@contextmanager
def without_pre_dispatch() -> Iterator[None]:
    """Skip the dispatch key at which ``torch.export`` records ops."""
    key = DispatchKey.PreDispatch
    included = torch._C._dispatch_tls_local_include_set().remove(key)
    excluded = torch._C._dispatch_tls_local_exclude_set() | torch._C.DispatchKeySet(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield
