"""Removes wrappers from a user's model, and gives a Lightning module a forward."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ampaudit.core.errors import InputError, SourceError, first_line
from ampaudit.core.untrusted import describe
from ampaudit.source.interface import Batch
from ampaudit.trace.isolation import structural_copy

_FORWARD = "give the module a forward() that returns the loss"
_FSDP = {  # by the names of classes, since torch.distributed.fsdp takes a second to import
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
}


def auditable(model: nn.Module) -> nn.Module:
    """Check and unwrap a user's model; every command passes models through here.

    Raises:
        SourceError: The model is sharded over processes, by FSDP or tensor parallelism (DTensor).
    """
    for path, module in model.named_modules():
        kind = fsdp_kind(module)
        if kind is not None:
            what = f"layer {describe(path)}" if path else f"the model ({type(module).__name__})"
            raise _sharded_error(what, kind)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, DTensor):
            raise _sharded_error(describe(name), "a DTensor, as of parallelize_module")
    return unwrapped(model)


def unwrapped(model: nn.Module) -> nn.Module:
    """Remove wrappers at any depth; a model with inner wrappers is copied and shares its tensors."""
    model = _innermost(model)
    if all(_innermost(module) is module for module in model.modules()):
        return model
    replaced: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    replaced |= {id(m): _innermost(m) for m in model.modules() if isinstance(m, torch.jit.ScriptModule)}
    copied = structural_copy(model, replaced)
    pending = [copied]
    while pending:
        module = pending.pop()
        for name, child in module._modules.items():  # including modules registered under several names
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
    """Rebuild the Python module behind a scripted one; ``None`` if only its graph is known.

    TorchScript keeps the class and the attributes that its code reads until a module is frozen or saved.
    """
    concrete: Any = getattr(script, "_concrete_type", None)
    kind = None if concrete is None else concrete.py_class
    if kind is None or "<locals>.QualnameWrapper" in kind.__qualname__:  # a traced module
        return None
    module: nn.Module
    if issubclass(kind, nn.RNNBase):  # holds its weights twice
        names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
        module = kind(**{name: getattr(script, name) for name in names}, device="meta")
    else:
        module = kind.__new__(kind)
        nn.Module.__init__(module)
    for name, value in concrete.get_constants().items():
        setattr(module, name, value)
    for name in concrete.get_attributes():
        if name in ("_flat_weights", "_flat_weights_names", "_all_weights"):
            continue
        value = getattr(script, name)
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            module.register_buffer(name, value)
        else:
            setattr(module, name, value)
    for name, child in script.named_children():
        inner = _original(child)
        if inner is None:
            return None
        module.add_module(name, inner)
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
    return module


def fsdp_kind(module: nn.Module) -> str | None:
    """Return the FSDP API that sharded a module; ``None`` if it is not sharded."""
    return next((_FSDP[base.__name__] for base in type(module).__mro__ if base.__name__ in _FSDP), None)


def _sharded_error(what: str, how: str) -> SourceError:
    return SourceError(
        f"{what} is sharded over processes already ({how})",
        hint="pass the module before it goes through fully_shard, FSDP or parallelize_module",
    )


def runnable(model: nn.Module, what: str) -> nn.Module:
    """Return a module that can be called and traced.

    A Lightning module without a forward is copied with shared parameters; the copy runs
    ``training_step`` on a batch and returns the loss.

    Raises:
        SourceError: The module is a TorchScript program.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise SourceError(
            f"{what} is a TorchScript program, whose ops have no Python code to audit",
            hint="pass the Python model behind it, or export that with torch.export.save",
        )
    if overrides_lightning(model, "forward") or not overrides_lightning(model, "training_step"):
        return model
    stepping, kind = copy.copy(model), type(model)
    methods: dict[str, Any] = {"forward": _run_step, "__module__": kind.__module__}
    methods |= dict.fromkeys(("log", "log_dict"), lambda *args, **kwargs: None)  # there is no trainer
    stepping.__class__ = type(kind.__name__, (kind,), methods)
    return stepping


def overrides_lightning(model: nn.Module, name: str) -> bool:
    """Return whether a module overrides a method of LightningModule; Lightning is not imported."""
    base = next((base for base in type(model).__mro__ if base.__name__ == "LightningModule"), None)
    return base is not None and getattr(type(model), name) is not getattr(base, name)


def _run_step(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the training step on a batch and return its loss."""
    batch = Batch(args, kwargs).whole
    name = type(self).__name__
    if not getattr(self, "automatic_optimization", True):
        raise InputError(f"{name} optimizes manually: its training_step needs a Trainer", hint=_FORWARD)
    arguments: tuple[Any, ...] = (batch, 0)
    try:
        inspect.signature(self.training_step).bind(*arguments)
    except TypeError:
        arguments = arguments[:1]  # it takes no index
    try:
        result = self.training_step(*arguments)
    except RuntimeError as error:
        if "not attached to a" not in str(error):
            raise
        raise InputError(
            f"training_step of {name} needs a Trainer: {first_line(error)}", hint=_FORWARD
        ) from error
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, torch.Tensor):
        raise InputError(f"training_step of {name} returns no loss", hint=f"return the loss, or {_FORWARD}")
    return loss
