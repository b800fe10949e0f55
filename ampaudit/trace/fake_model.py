"""Copies a model without its weights: every module and attribute, with fake tensors as parameters.

Tracing the copy leaves the user's model untouched, costs no memory for weights, and lets the
parameters have the dtype in which the policy stores them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from ampaudit.core.errors import TraceFailed, first_line
from ampaudit.policy.decide import class_names, matches_any, matches_class, with_attributes
from ampaudit.policy.schema import KeepFp32, WeightPolicy
from ampaudit.trace.internals import FakeTensorMode
from ampaudit.trace.isolation import structural_copy
from ampaudit.trace.values import CASTABLE_DTYPES, dtype_name

Conversion = Callable[[nn.Module], object]
Hook = Callable[..., Any]  # on a gradient


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by name, tied ones under each of their names."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    return tensors


def place_tensor(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Register a parameter or buffer under a dotted name, in modules that are made where they are missing."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(leaf, tensor)
    else:
        root.register_buffer(leaf, tensor)


def without_data(model: nn.Module, convert: Callable[[nn.Module], object]) -> nn.Module:
    """Copy a model without the data of its parameters and buffers, and convert the copy.

    Raises:
        TraceFailed: The method needs data, or fails.
    """
    empty: dict[int, torch.Tensor] = {}
    for tensor in named_tensors(model).values():
        if id(tensor) not in empty:
            shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            empty[id(tensor)] = nn.Parameter(shape, tensor.requires_grad) if is_parameter else shape
    clone = structural_copy(model, empty)
    try:
        convert(clone)
    except Exception as error:
        raise TraceFailed(
            f"{type(model).__name__} cannot be converted on a copy without data: {first_line(error)}",
            hint="choose a policy that does not call the model's own method, such as apex-o2",
        ) from error
    return clone


def make_fake_model(
    model: nn.Module,
    mode: FakeTensorMode,
    dtypes: Mapping[str, torch.dtype],
    convert: Callable[[nn.Module], object] | None = None,
    *,
    trained: bool = False,
    hooked: bool = False,
) -> tuple[nn.Module, dict[str, list[Hook]]]:
    """Copy a model with fake tensors as its parameters and buffers, and the hooks of its parameters by name.

    ``dtypes`` are those of stored tensors by name; the others keep theirs. If the policy calls the model's
    own method that converts it to 16 bits (``convert``), the copy gets the method's other effects as well.
    Parameters keep ``requires_grad`` if ``trained``, and their hooks if ``hooked``.
    """
    originals = named_tensors(model)
    source = model if convert is None else without_data(model, convert)
    fakes: dict[int, torch.Tensor] = {}
    for name, tensor in named_tensors(source).items():
        if id(tensor) not in fakes:
            original = originals.get(name, tensor)
            fake = fake_like(original, mode, dtypes.get(name, original.dtype))
            requires_grad = trained and original.requires_grad and fake.is_floating_point()
            fakes[id(tensor)] = (
                nn.Parameter(fake, requires_grad) if isinstance(tensor, nn.Parameter) else fake
            )
    hooks = {name: list((tensor._backward_hooks or {}).values()) for name, tensor in originals.items()}
    to_copy = {name: functions for name, functions in hooks.items() if functions and hooked}
    clone, hooks = structural_copy((source, to_copy), fakes)  # in one copy: they may share objects
    without_cache(clone)
    return clone, hooks


def constant_masters(model: nn.Module, copy: nn.Module) -> dict[int, torch.Tensor]:
    """Map each unregistered tensor that the copy's conversion has cast, by identity, to the original."""
    masters: dict[int, torch.Tensor] = {}
    for theirs, ours in zip(model.modules(), copy.modules(), strict=False):
        for name, tensor in vars(ours).items():
            master: Any = vars(theirs).get(name)
            tensors = isinstance(tensor, torch.Tensor) and isinstance(master, torch.Tensor)
            if tensors and tensor.dtype != master.dtype and tensor.shape == master.shape:
                masters[id(tensor)] = master
    return masters


def fake_like(
    tensor: torch.Tensor, mode: FakeTensorMode, dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Make a fake tensor with the shape, strides and (by default) device of another one."""
    with mode:
        return torch.empty_strided(
            tuple(tensor.shape), tensor.stride(), dtype=dtype, device=device or tensor.device
        )


def without_cache(copy: nn.Module) -> None:
    """Switch off generation caches, which a single pass does not need and export does not support."""
    for module in copy.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False


def conversion_method(weights: WeightPolicy, low_dtype: torch.dtype) -> Conversion | None:
    """Return the model's own conversion method, if the policy calls one."""
    if weights.storage != "lower" or weights.casts not in ("half", "to"):
        return None
    if weights.casts == "to":
        return lambda model: model.to(low_dtype)
    return lambda model: model.half() if low_dtype is torch.float16 else model.bfloat16()


def is_cast(dtype: torch.dtype, weights: WeightPolicy) -> bool:
    """Return whether the policy casts stored tensors and inputs of a dtype."""
    return dtype in CASTABLE_DTYPES if weights.casts == "float32" else dtype.is_floating_point


def stored_dtypes(model: nn.Module, weights: WeightPolicy, low_dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Map the names of tensors that are stored in another dtype to that dtype.

    A tensor with several names is treated alike under each: where one is kept, all are.
    """
    return storage_of(model, weights, low_dtype).dtypes


class Storage(NamedTuple):
    """How a policy stores the tensors of a model, by their names."""

    dtypes: dict[str, torch.dtype]  # of tensors that are stored in another dtype
    rounded: frozenset[str]  # stored in 16 bits, although the model's code sees float32
    split_ties: tuple[tuple[str, ...], ...]  # names of one tensor that the policy would store differently


def storage_of(model: nn.Module, weights: WeightPolicy, low_dtype: torch.dtype) -> Storage:
    """Return how a policy stores a model."""
    stored = _policy_dtypes(model, weights, low_dtype)
    tied: dict[int, list[str]] = defaultdict(list)
    for name, tensor in named_tensors(model).items():
        tied[id(tensor)].append(name)
    split = [n for n in tied.values() if 0 < sum(name in stored for name in n) < len(n)]
    apart = {name for names in split for name in names}
    dtypes = {name: dtype for name, dtype in stored.items() if name not in apart}
    ties = tuple(map(tuple, split))
    if weights.storage == "rounded":
        return Storage({}, frozenset(dtypes), ties)
    return Storage(dtypes, frozenset(), ties)


def _policy_dtypes(model: nn.Module, weights: WeightPolicy, low_dtype: torch.dtype) -> dict[str, torch.dtype]:
    if weights.storage == "float32":
        return {}
    listed = _fp32_modules(model, low_dtype) if weights.keep_fp32_modules == "respect" else ()
    classes = [class_names(type(module)) for module in model.modules()]
    rules = [
        rule
        for rule in weights.keep
        if (not rule.dtype or dtype_name(low_dtype) in rule.dtype)
        and (not rule.model or any(matches_class(rule.model, names) for names in classes))
    ]
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors, convert = named_tensors(model), conversion_method(weights, low_dtype)
    if convert is None:
        cast = {name: low_dtype for name, tensor in tensors.items() if is_cast(tensor.dtype, weights)}
    else:
        new_tensors = named_tensors(without_data(model, convert))
        cast = {
            n: new_tensors[n].dtype
            for n, t in tensors.items()
            if n in new_tensors and new_tensors[n].dtype != t.dtype
        }

    def is_cast_by_policy(name: str) -> bool:
        path, _, own_name = name.rpartition(".")
        # a checkpoint has no non-persistent buffers
        loaded = weights.buffers == "all" or own_name not in modules[path]._non_persistent_buffers_set
        keeps = _is_listed(name, listed) or any(_keeps(rule, name, modules[path]) for rule in rules)
        return loaded and not keeps

    return {name: dtype for name, dtype in cast.items() if is_cast_by_policy(name)}


def kept_by_author(model: nn.Module, low_dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a test for parameters that the model's class keeps in FP32."""
    listed = _fp32_modules(model, low_dtype)
    return lambda name: _is_listed(name, listed)


def _is_listed(name: str, listed: Iterable[str]) -> bool:
    return any(fnmatchcase(part, pattern) for part in name.split(".") for pattern in listed)


def storage_notes(model: nn.Module, weights: WeightPolicy, low_dtype: torch.dtype) -> tuple[str, ...]:
    """Describe which modules the model asks to keep in FP32, and whether the policy does."""
    listed = _fp32_modules(model, low_dtype)
    if weights.storage == "float32" or not listed:
        return ()
    respected = weights.keep_fp32_modules == "respect"
    what = "kept in FP32 as the author asks" if respected else "cast all the same, as this policy says"
    return (f"the model asks to keep {', '.join(listed)} in FP32: {what}",)


def _fp32_modules(model: nn.Module, low_dtype: torch.dtype) -> tuple[str, ...]:
    """Return the names of modules that the model asks to keep in FP32.

    Transformers heeds ``_keep_in_fp32_modules`` for float16 only, and the strict list for both formats.
    """
    lists = ["_keep_in_fp32_modules_strict"]
    if low_dtype is torch.float16:
        lists.append("_keep_in_fp32_modules")
    names: set[str] = set()
    for module in model.modules():
        for attribute in lists:
            listed = getattr(module, attribute, None)
            if isinstance(listed, Iterable):
                names.update(str(name) for name in listed)
    return tuple(sorted(names))


def _keeps(rule: KeepFp32, name: str, module: nn.Module) -> bool:
    return (
        (not rule.module or matches_class(rule.module, class_names(type(module))))
        and (not rule.attributes or with_attributes(module, rule.attributes))
        and (not rule.parameter or matches_any(rule.parameter, name))
    )
