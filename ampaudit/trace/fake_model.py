"""A copy of the model that has every module and attribute but no weights: parameters are fake tensors.

Tracing on the shadow leaves the user's model untouched, costs no memory for weights, and lets the
parameters have the dtype in which the policy stores them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ampaudit.core.errors import TraceFailed, first_line
from ampaudit.trace.internals import FakeTensorMode
from ampaudit.trace.structure import structural_copy

__all__ = [
    "FakeModel",
    "constant_masters",
    "fake_like",
    "make_fake_model",
    "named_tensors",
    "without_cache",
    "without_data",
]


class FakeModel(NamedTuple):
    """The copy, and the hooks of parameters' gradients by name."""

    model: nn.Module
    hooks: dict[str, list[Callable[..., Any]]]


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by every name it has, tied ones under each name."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    return tensors


def without_data(model: nn.Module, convert: Callable[[nn.Module], object]) -> nn.Module:
    """A copy whose parameters and buffers have no data, after a method of the model has converted it.

    Raises:
        TraceFailed: the method needs data, or fails.
    """
    empty: dict[int, torch.Tensor] = {}
    for tensor in named_tensors(model).values():
        if id(tensor) not in empty:
            shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            empty[id(tensor)] = nn.Parameter(shape, tensor.requires_grad) if is_parameter else shape
    made = structural_copy(model, empty)
    try:
        convert(made)
    except Exception as error:
        raise TraceFailed(
            f"{type(model).__name__} cannot be converted on a copy without data: {first_line(error)}",
            hint="choose a policy that does not call the model's own method, such as apex-o2",
        ) from error
    return made


def make_fake_model(
    model: nn.Module,
    mode: FakeTensorMode,
    dtypes: Mapping[str, torch.dtype],
    convert: Callable[[nn.Module], object] | None = None,
    *,
    trained: bool = False,
) -> FakeModel:
    """The shadow, with parameters and buffers as fake tensors.

    Args:
        model: the user's model; not changed.
        mode: the fake mode that the trace will use.
        dtypes: of stored parameters and buffers by name; the others stay as they are.
        convert: the model's own method that makes it one of 16 bits, if the policy calls one: what that does
            besides changing dtypes is done to the shadow, too.
        trained: whether its parameters ask for gradients where the model's do, and have their hooks.
    """
    own = named_tensors(model)
    source = model if convert is None else without_data(model, convert)
    fakes: dict[int, torch.Tensor] = {}
    for name, tensor in named_tensors(source).items():
        if id(tensor) not in fakes:
            original = own.get(name, tensor)
            fake = fake_like(original, mode, dtypes.get(name, original.dtype))
            asks = trained and original.requires_grad and fake.is_floating_point()
            fakes[id(tensor)] = nn.Parameter(fake, asks) if isinstance(tensor, nn.Parameter) else fake
    if not trained:
        made = FakeModel(structural_copy(source, fakes), {})
    else:
        hooks = {name: list((tensor._backward_hooks or {}).values()) for name, tensor in own.items()}
        copied = structural_copy(_WithHooks(source, {n: h for n, h in hooks.items() if h}), fakes)
        made = FakeModel(copied.model, copied.hooks)
    without_cache(made.model)
    return made


class _WithHooks(nn.Module):
    """A model and the hooks of its parameters, to be copied together: both may share objects."""

    def __init__(self, model: nn.Module, hooks: dict[str, list[Any]]) -> None:
        super().__init__()
        self.model = model
        self.hooks = hooks


def constant_masters(model: nn.Module, shadow: nn.Module) -> dict[int, torch.Tensor]:
    """For each unregistered tensor that the shadow's conversion has cast, the model's own, by identity."""
    masters: dict[int, torch.Tensor] = {}
    for theirs, ours in zip(model.modules(), shadow.modules(), strict=False):
        for name, tensor in vars(ours).items():
            own: Any = vars(theirs).get(name)
            tensors = isinstance(tensor, torch.Tensor) and isinstance(own, torch.Tensor)
            if tensors and tensor.dtype != own.dtype and tensor.shape == own.shape:
                masters[id(tensor)] = own
    return masters


def fake_like(tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor with the shape, strides and device of a real one."""
    with mode:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device, requires_grad=False
        )


def without_cache(shadow: nn.Module) -> None:
    """Generation caches change no value of one forward pass, and their types cannot be exported."""
    for module in shadow.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
