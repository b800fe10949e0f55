"""Refuses models and inputs that no trace can follow, in one line and before anything runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import PackedSequence

from ampaudit.core.errors import InputError, SourceError
from ampaudit.core.untrusted import describe
from ampaudit.trace.entry import named_inputs
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.internals import FakeTensor

__all__ = ["refuse_unsupported"]

_FLOAT_FUNCTIONALS = ("FloatFunctional", "FXFloatFunctional")  # in that package, but plain
_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.ao.nn.sparse.quantized")
# subclasses of which torch knows how to trace every op
_TRACED = (FakeTensor, DTensor)


def refuse_unsupported(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, packed: bool = True
) -> None:
    """Raise for what torch.export is known not to trace, naming the layer or the input.

    Args:
        model: the model.
        args: positional inputs.
        kwargs: keyword inputs.
        packed: whether to refuse packed sequences, which only a trace along one path follows.

    Raises:
        SourceError: the model is TorchScript, quantized, without values, or has special tensors.
        InputError: an input is no plain tensor.
    """
    for path, module in model.named_modules():
        _refuse_module(module, f"layer {describe(path)}" if path else f"the model ({type(module).__name__})")
    for name, tensor in named_tensors(model).items():
        what = _special(tensor)
        if what is not None:
            raise SourceError(f"{describe(name)} is {what[0]}", hint=what[1])
    for name, value in named_inputs(args, kwargs):
        if isinstance(value, DTensor):
            raise InputError(
                f"{describe(name)} is spread over processes (a DTensor)",
                hint="give the whole tensor to each process: full_tensor()",
            )
        what = None if isinstance(value, PackedSequence) and not packed else _special(value)
        if what is not None:
            raise InputError(f"{describe(name)} is {what[0]}", hint=what[1])


def _refuse_module(module: nn.Module, name: str) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise SourceError(
            f"{name} is TorchScript that was traced, frozen or loaded: its Python code is not known",
            hint="return the nn.Module from which it was made",
        )
    if type(module).__module__.startswith(_QUANTIZED) and type(module).__name__ not in _FLOAT_FUNCTIONALS:
        raise SourceError(
            f"{name} is quantized ({type(module).__name__}): its weights are integers",
            hint="return the model as it is before it is quantized; 16 bits are an alternative to int8",
        )
    if isinstance(module, nn.modules.lazy.LazyModuleMixin) and module.has_uninitialized_params():
        raise SourceError(
            f"{name} is a lazy layer without a shape yet",
            hint="call the model once on its inputs before get_model() returns it",
        )


def _special(value: Any) -> tuple[str, str] | None:
    """Return what a tensor is, and what to do instead; ``None`` for a plain tensor or no tensor."""
    if isinstance(value, PackedSequence):
        return (
            "a packed sequence, which torch.export does not trace",
            "pass the padded batch (pad_packed_sequence) to the recurrent layer while you audit it",
        )
    if not isinstance(value, torch.Tensor) or isinstance(value, _TRACED):
        return None
    if value.is_meta:
        return (
            "on the meta device: it has no values",
            "create the model and its inputs with values, or load weights with --weights FILE",
        )
    if value.is_nested:
        return (
            "a nested tensor, which ampaudit does not trace",
            "pad it to one length (to_padded_tensor), with a mask if the model takes one",
        )
    if value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.").replace("_", " ")
        return (
            f"a tensor of layout {layout}, which ampaudit does not trace",
            "give it as a dense tensor (to_dense), or audit the part of the model after it",
        )
    if value.is_quantized or hasattr(value, "__tensor_flatten__"):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        what = "a quantized tensor" if value.is_quantized else f"a tensor subclass ({describe(kind)})"
        return (
            f"{what}, which computes in formats of its own",
            "audit the model as it is before the weights are converted (torchao's quantize_, for example)",
        )
    return None
