"""Wrappers that compute a model in mixed precision, over the model's own parameters and submodules.

The graph is that of the whole model; DTensor computes each op on the shards and communicates as needed.
Inputs and outputs are therefore whole, and a plan's layouts of activations between layers are not used.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils import _pytree as pytree

from ampaudit.core.errors import RunFailed, UsageError, first_line
from ampaudit.core.untrusted import describe
from ampaudit.source.unwrapping import fsdp_kind
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.isolation import structural_copy
from ampaudit.trace.values import widened_tensor

_PLANS = "torch.distributed.tensor"  # the package whose hooks redistribute inputs and outputs of layers
OWN_CODE = "use ampaudit.prepare(..., how='autocast')"
Executable = Callable[[Sequence[torch.Tensor]], tuple[Any, ...]]


class ModelProxy(nn.Module):
    """Wrap a model such that optimizers, checkpoints and DDP see the model's own tensors.

    Calling the user's model directly computes as before.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        hidden = self.__dict__
        hidden["_ampaudit_model"] = model
        for table in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            hidden[table] = model.__dict__[table]
        self.training = model.training
        self._ampaudit_plain = False

    @property
    def original(self) -> nn.Module:
        """The user's model, with the same parameters."""
        model: nn.Module = self.__dict__["_ampaudit_model"]
        return model

    def train(self, mode: bool = True) -> ModelProxy:
        """Set the mode of this module and of the model."""
        self.original.train(mode)
        self.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        if self._ampaudit_plain:
            return self.original(*args, **kwargs)
        return self.mixed(*args, **kwargs)

    @property
    @abstractmethod
    def low_dtype(self) -> torch.dtype:
        """The 16-bit format of the mixed precision."""

    @abstractmethod
    def mixed(self, *args: Any, **kwargs: Any) -> Any:
        """Compute in mixed precision."""

    @contextmanager
    def float32(self) -> Iterator[nn.Module]:
        """Call the model in FP32 with its masters while active."""
        before, self._ampaudit_plain = self._ampaudit_plain, True
        try:
            yield self
        finally:
            self._ampaudit_plain = before


class AutocastModule(ModelProxy):
    """Run the model's own code under autocast, for models that no graph can contain; outputs are float32."""

    def __init__(self, model: nn.Module, device: str, dtype: torch.dtype) -> None:
        super().__init__(model)
        self._ampaudit_autocast = device, dtype

    @property
    def low_dtype(self) -> torch.dtype:
        """The format of autocast."""
        return self._ampaudit_autocast[1]

    def mixed(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own code under autocast."""
        device, dtype = self._ampaudit_autocast
        with torch.autocast(device, dtype=dtype):
            return in_float32(self.original(*args, **kwargs))


def in_float32(output: Any) -> Any:
    """Convert 16-bit outputs to float32, so that an outside loss is computed in float32."""
    return pytree.tree_map_only(torch.Tensor, widened_tensor, output)


def is_spread(model: nn.Module) -> bool:
    """Return whether parameters of a model are DTensors.

    Raises:
        UsageError: FSDP shards single layers of the model.
    """
    if not any(isinstance(tensor, DTensor) for tensor in named_tensors(model).values()):
        return False
    for name, module in model.named_modules():
        if fsdp_kind(module) is not None:
            raise UsageError(
                f"layer {describe(name)} is sharded by itself, but a graph runs the model as a whole",
                hint=f"shard only the whole: fully_shard(prepared.model); or {OWN_CODE}",
            )
    return True


def without_plan(model: nn.Module) -> nn.Module:
    """Return a copy with the same parameters and without the hooks that redistribute activations."""
    copied = structural_copy(model, {id(tensor): tensor for tensor in named_tensors(model).values()})
    for module in copied.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in list(hooks.items()):
                if (getattr(hook, "__module__", None) or "").startswith(_PLANS):
                    del hooks[key]
    return copied


def on_shards(run: Executable, values: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Run a graph on values that may be DTensors, and return whole outputs.

    Raises:
        UsageError: Parameters are spread over different meshes.
        RunFailed: DTensor cannot compute an op.
    """
    meshes = list(dict.fromkeys(value.device_mesh for value in values if isinstance(value, DTensor)))
    if not meshes:
        return run(values)
    if len(meshes) > 1:
        raise UsageError("parameters are spread over different meshes", hint=OWN_CODE)
    try:
        outputs = run([_placed(value, meshes[0]) for value in values])
    except (NotImplementedError, RuntimeError) as error:
        if not any(word in str(error) for word in ("sharding", "Sharding", "DTensor")):
            raise
        raise RunFailed(f"no rule for sharded parameters: {first_line(error)}", hint=OWN_CODE) from error
    return tuple(o.full_tensor() if isinstance(o, DTensor) else o for o in outputs)


def _placed(value: torch.Tensor, mesh: DeviceMesh) -> Any:
    """Return a DTensor whose gradient has the placements of the value."""
    if isinstance(value, DTensor):
        return value.redistribute(placements=value.placements)
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def replicated(value: Any, like: torch.Tensor) -> Any:
    """Return a constant of the graph, replicated over the mesh of ``like`` if that is a DTensor."""
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor):
        return value
    return _placed(value, like.device_mesh)


def by_parts(function: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function to the local part of a tensor, after reducing partial sums.

    Of a sparse gradient, it sees the values that are stored, before those of one index are added up.
    """
    if value.is_sparse:
        parts = function(value._values())
        return torch.sparse_coo_tensor(value._indices(), parts, value.shape, check_invariants=False)
    if not isinstance(value, DTensor):
        return function(value)
    placements = [Replicate() if isinstance(p, Partial) else p for p in value.placements]
    value = value.redistribute(placements=placements)
    result = function(value.to_local())
    shape, stride = value.shape, value.stride()
    return DTensor.from_local(
        result, value.device_mesh, placements, run_check=False, shape=shape, stride=stride
    )
