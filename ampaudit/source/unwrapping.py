"""Finds the Python modules inside compiled, data-parallel and TorchScript modules, which compute the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ampaudit.core.errors import SourceError
from ampaudit.core.untrusted import describe
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.structure import structural_copy

__all__ = ["auditable", "fsdp_kind", "unwrapped"]

_FSDP = {  # by the names of classes, since torch.distributed.fsdp takes a second to import
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
}


def auditable(model: nn.Module) -> nn.Module:
    """Return a model of the user's without wrappers; every command takes its models from here.

    Raises:
        SourceError: it is sharded over processes.
    """
    refuse_sharded(model)
    return unwrapped(model)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without wrappers at any depth; a copy that shares its tensors if some are inside."""
    model = _innermost(model)
    if all(_innermost(module) is module for module in model.modules()):
        return model
    kept: dict[int, Any] = {id(tensor): tensor for tensor in named_tensors(model).values()}
    kept |= {id(m): _innermost(m) for m in model.modules() if isinstance(m, torch.jit.ScriptModule)}
    copied = structural_copy(model, kept)
    pending = [copied]
    while pending:
        module = pending.pop()
        for name, child in module._modules.items():  # those that stand under several names as well
            module._modules[name] = None if child is None else _innermost(child)
        pending += module.children()
    return copied


def _innermost(module: nn.Module) -> nn.Module:
    inner: Any = getattr(module, "_orig_mod", None)
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        inner = module.module
    elif isinstance(module, torch.jit.ScriptModule):
        return _original(module) or module
    return _innermost(inner) if isinstance(inner, nn.Module) else module


def _original(script: Any) -> nn.Module | None:
    """Rebuild the Python module that was scripted; ``None`` if only its graph is known.

    TorchScript keeps the class and the attributes that its code may read, until a module is frozen or saved.
    """
    kept: Any = getattr(script, "_concrete_type", None)
    own = None if kept is None else kept.py_class
    if own is None or "<locals>.QualnameWrapper" in own.__qualname__:  # of a traced module
        return None
    made: nn.Module
    if issubclass(own, nn.RNNBase):  # it keeps its weights twice
        names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
        made = own(**{name: getattr(script, name) for name in names}, device="meta")
    else:
        made = own.__new__(own)
        nn.Module.__init__(made)
    for name, value in kept.get_constants().items():
        setattr(made, name, value)
    for name in kept.get_attributes():
        if name not in ("_flat_weights", "_flat_weights_names", "_all_weights"):
            _set(made, name, getattr(script, name))
    for name, child in script.named_children():
        inner = _original(child)
        if inner is None:
            return None
        made.add_module(name, inner)
    if isinstance(made, nn.RNNBase):
        made._init_flat_weights()
    return made


def _set(module: nn.Module, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        module.register_buffer(name, value)
    else:
        setattr(module, name, value)


def fsdp_kind(module: nn.Module) -> str | None:
    """Return what has sharded a module as FSDP does; ``None`` if nothing has."""
    return next((_FSDP[base.__name__] for base in type(module).__mro__ if base.__name__ in _FSDP), None)


def refuse_sharded(model: nn.Module) -> None:
    """Raise for a model that is sharded, naming the layer or the parameter.

    Raises:
        SourceError: it is sharded by FSDP, or by tensor parallelism (DTensor).
    """
    for path, module in model.named_modules():
        kind = fsdp_kind(module)
        if kind is not None:
            raise _refused(
                f"layer {describe(path)}" if path else f"the model ({type(module).__name__})", kind
            )
    for name, tensor in named_tensors(model).items():
        if isinstance(tensor, DTensor):
            raise _refused(describe(name), "DTensor, as parallelize_module makes it")


def _refused(what: str, how: str) -> SourceError:
    return SourceError(
        f"{what} is sharded over processes already ({how})",
        hint="give the plain module, as it is before fully_shard, FSDP or parallelize_module",
    )
