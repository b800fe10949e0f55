"""Runs a graph on parameters that tensor parallelism has spread over processes (DTensor).

The graph is that of the whole model; DTensor computes each op on the parts and exchanges what the op needs.
So inputs and outputs are whole, and the layouts that a plan gives to what passes between layers are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from ampaudit.core.errors import RunFailed, UsageError, first_line
from ampaudit.core.untrusted import describe
from ampaudit.source.sharding import fsdp_kind
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.structure import structural_copy

__all__ = ["Executable", "by_parts", "is_spread", "on_shards", "replicated", "without_plan"]

_PLANS = "torch.distributed.tensor"  # the package whose hooks redistribute inputs and outputs of layers
_OWN_CODE = "use ampaudit.prepare(..., how='autocast')"
Executable = Callable[[Sequence[torch.Tensor]], tuple[Any, ...]]


def is_spread(model: nn.Module) -> bool:
    """Return whether parameters of a model are spread over processes, other than by FSDP as a whole.

    Raises:
        UsageError: its layers are sharded by FSDP one by one.
    """
    if not any(isinstance(tensor, DTensor) for tensor in named_tensors(model).values()):
        return False
    for name, module in model.named_modules():
        if fsdp_kind(module) is not None:
            raise UsageError(
                f"layer {describe(name)} is sharded by itself, but a graph runs the model as a whole",
                hint=f"shard only the whole: fully_shard(prepared.model); or {_OWN_CODE}",
            )
    return True


def without_plan(model: nn.Module) -> nn.Module:
    """Return a copy, with the same parameters, that does not redistribute what passes between layers."""
    copied = structural_copy(model, {id(tensor): tensor for tensor in named_tensors(model).values()})
    for module in copied.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if (getattr(hook, "__module__", None) or "").startswith(_PLANS):
                    del hooks[key]
    return copied


def on_shards(run: Executable, values: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Run a graph on values of which some may be spread over processes, and return whole outputs.

    Raises:
        UsageError: parameters are spread in several ways.
        RunFailed: DTensor has no way to compute an op.
    """
    meshes = list(dict.fromkeys(value.device_mesh for value in values if isinstance(value, DTensor)))
    if not meshes:
        return run(values)
    if len(meshes) > 1:
        raise UsageError("parameters are spread over different meshes", hint=_OWN_CODE)
    try:
        outputs = run([_placed(value, meshes[0]) for value in values])
    except (NotImplementedError, RuntimeError) as error:
        if not any(word in str(error) for word in ("sharding", "Sharding", "DTensor")):
            raise
        raise RunFailed(f"no rule for sharded parameters: {first_line(error)}", hint=_OWN_CODE) from error
    return tuple(o.full_tensor() if isinstance(o, DTensor) else o for o in outputs)


def _placed(value: torch.Tensor, mesh: DeviceMesh) -> Any:
    """Return a value as autograd shall see it: with a gradient that is placed like the value."""
    if isinstance(value, DTensor):
        return value.redistribute(placements=value.placements)
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def replicated(value: Any, like: torch.Tensor) -> Any:
    """Return a tensor that a graph makes of nothing, next to those that are spread over processes."""
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor):
        return value
    return _placed(value, like.device_mesh)


def by_parts(function: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor) -> torch.Tensor:
    """Apply a function of each element to the parts of a tensor; what is still to be added up is, before."""
    if not isinstance(value, DTensor):
        return function(value)
    kept = [Replicate() if isinstance(p, Partial) else p for p in value.placements]
    value = value.redistribute(placements=kept)
    made = function(value.to_local())
    shape, stride = value.shape, value.stride()
    return DTensor.from_local(made, value.device_mesh, kept, run_check=False, shape=shape, stride=stride)
