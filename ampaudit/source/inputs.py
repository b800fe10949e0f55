"""Reads a model's inputs: from a Python file, a safetensors file, or recorded calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.checkpoint.mapped import map_checkpoint
from ampaudit.core.errors import InputError, UsageError
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.untrusted import describe
from ampaudit.report.inputs import GIVEN, InputsInfo
from ampaudit.source.calls import recorded_calls
from ampaudit.source.interface import INPUT_SEED_OFFSET, Batch, ModelSource, Sized
from ampaudit.source.user_code import calling_user_code, module_from_file

__all__ = [
    "Functions",
    "batches_of",
    "functions_of",
    "has_inputs",
    "inputs_from",
    "save_inputs",
    "unknown_axis",
    "with_inputs",
    "with_tensors",
]

_MISSING = object()
_FUNCTIONS = ("batches", "example_inputs", "example_kwargs")
_HINTS = {
    "NoneType": "return the inputs; for a model that takes none, return ()",
    "generator": "name the function batches() if it yields batches",
    "ndarray": "return a tensor: torch.from_numpy(...)",
}


def has_inputs(module: ModuleType) -> bool:
    """Return whether a file defines inputs."""
    return callable(getattr(module, "batches", None)) or callable(getattr(module, "example_inputs", None))


def batches_of(module: ModuleType, count: int, seed: int, sizes: Mapping[str, int]) -> tuple[Batch, ...]:
    """Return up to ``count`` batches from batches() or from repeated calls of example_inputs().

    Args:
        module: Module of the input file.
        count: Number of batches.
        seed: Random seed.
        sizes: Arguments for these functions, such as ``length``.

    Raises:
        InputError: Neither function exists, or its result is not an input.
        UsageError: No function has such a parameter.
    """
    _check_sizes(module, sizes)
    kwargs = _call(module, "example_kwargs", {}, sizes)
    if not isinstance(kwargs, Mapping):
        raise InputError(f"example_kwargs() returned {type(kwargs).__name__}", hint="return a dict")
    torch.manual_seed(seed + INPUT_SEED_OFFSET)
    result = _call(module, "batches", _MISSING, sizes)
    if result is not _MISSING:
        with calling_user_code("batches()"):
            items = list(islice(_iterable(result), count))
        if not items:
            raise InputError("batches() yields nothing", hint="yield at least one batch")
        return tuple(_batch(module, item, kwargs, "batches()") for item in items)
    if not callable(getattr(module, "example_inputs", None)):
        raise InputError(
            f"{module.__file__} has no example_inputs()",
            hint="add: def example_inputs(): return torch.randn(2, 16)  # whatever the model takes",
        )
    return tuple(
        _batch(module, _call(module, "example_inputs", None, sizes), kwargs, "example_inputs()")
        for _ in range(count)
    )


class Functions(TypedDict):
    """The optional functions of a model file; ``None`` if it lacks one."""

    loss: Callable[..., Any] | None
    metric: Callable[..., Any] | None
    optimizer: Callable[..., Any] | None
    next_inputs: Any


def functions_of(*modules: ModuleType) -> Functions:
    """Return each function from the first module that defines it."""

    def first(name: str, fits: Callable[[Any], bool]) -> Any:
        return next((value for module in modules if fits(value := getattr(module, name, None))), None)

    return Functions(
        loss=first("loss", callable),
        metric=first("metric", callable),
        optimizer=first("optimizer", callable),
        next_inputs=first("next_inputs", lambda value: value is not None),
    )


def inputs_from(
    options: SourceConfig, model: nn.Module, *modules: ModuleType, same_model: bool = True
) -> tuple[Sized, Functions, InputsInfo]:
    """Return the batch function for --inputs, and the file's loss(), metric() and optimizer().

    Args:
        options: Options whose ``inputs`` is a Python file or the directory of a recording.
        model: Model that takes the batches.
        *modules: Fallbacks for functions that the file does not define.
        same_model: Whether the model has the parameter names of the recorded module.

    Raises:
        InputError, SourceError: See ``batches_of``, ``recorded_calls`` and ``module_from_file``.
    """
    path = options.inputs
    assert path is not None
    if path.is_dir():
        batches, info = recorded_calls(path, options.batches, model, same_model=same_model)
        return partial(_recorded, batches), functions_of(*modules), info
    module = module_from_file(path)
    sized = partial(batches_of, module, options.batches or 1, options.seed)
    return sized, functions_of(module, *modules), GIVEN


def _recorded(batches: tuple[Batch, ...], sizes: Mapping[str, int]) -> tuple[Batch, ...]:
    """Return recorded calls, whose sizes are fixed."""
    for axis in sizes:
        raise unknown_axis(axis, (), "a recording has the sizes that it has")
    return batches


def _call(module: ModuleType, name: str, default: Any, sizes: Mapping[str, int]) -> Any:
    function = getattr(module, name, None)
    if not callable(function):
        return default
    arguments = {axis: size for axis, size in sizes.items() if axis in _parameters(function)}
    with calling_user_code(f"{name}()"):
        return function(**arguments)


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Return the parameter names of a user's function."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _check_sizes(module: ModuleType, sizes: Mapping[str, int]) -> None:
    functions = [f for name in _FUNCTIONS if callable(f := getattr(module, name, None))]
    axes = list(dict.fromkeys(name for function in functions for name in _parameters(function)))
    for axis, size in sizes.items():
        if axis not in axes:
            raise unknown_axis(axis, axes, f"write def example_inputs({axis}={size}): ...")


def unknown_axis(axis: str, axes: Sequence[str], otherwise: str) -> UsageError:
    """Return the error for an axis that the inputs do not have."""
    hint = f"axes of these inputs: {describe(', '.join(axes))}" if axes else otherwise
    return UsageError(f"--sweep: the inputs have no axis {describe(axis)!r}", hint=hint)


def _iterable(value: Any) -> Iterable[Any]:
    if isinstance(value, torch.Tensor | Mapping) or not isinstance(value, Iterable):
        raise InputError(
            f"batches() returned {type(value).__name__}", hint="return a list of batches, or yield them"
        )
    return value


def _batch(module: ModuleType, item: Any, kwargs: Mapping[str, Any], what: str) -> Batch:
    """Build a batch; model_inputs(batch), if defined, selects the model's part of it."""
    select = getattr(module, "model_inputs", None)
    if not callable(select):
        return _inputs(item, kwargs, what)
    with calling_user_code("model_inputs(batch)"):
        value = select(item)
    return replace(_inputs(value, kwargs, "model_inputs(batch)"), item=item)


def _inputs(value: Any, kwargs: Mapping[str, Any], what: str) -> Batch:
    if isinstance(value, torch.Tensor):
        return Batch((value,), dict(kwargs))
    if isinstance(value, tuple | list) and any(item is ... for item in value):
        raise InputError(f"{what} gave ...", hint="put an input in its place")
    if isinstance(value, Mapping):
        return Batch((), {**kwargs, **{str(key): item for key, item in value.items()}})
    if isinstance(value, tuple | list):
        return Batch(tuple(value), dict(kwargs))
    raise InputError(f"{what} gave {type(value).__name__}", hint=_HINTS.get(type(value).__name__))


def with_inputs(source: ModelSource, path: Path) -> ModelSource:
    """Replace the batches of a source by the tensors ``input[0]``, ``input[1]``, ... of a file.

    Raises:
        WeightsError: The file cannot be read.
        InputError: The tensors do not fit the model.
    """
    saved = map_checkpoint(path).tensors
    batch = source.batches[0]
    leaves = pytree.tree_leaves((batch.args, batch.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    names = [f"input[{index}]" for index in range(len(tensors))]
    if set(saved) != set(names):
        raise InputError(
            f"{path} holds {describe(', '.join(sorted(saved))) or 'nothing'}",
            hint=f"the model takes {describe(', '.join(names))}",
        )
    for name, tensor in zip(names, tensors, strict=True):
        if saved[name].dtype != tensor.dtype:
            hint = f"{name} must be {tensor.dtype}"
            raise InputError(f"{path}: {name} is {saved[name].dtype}", hint=hint)
    batches = (with_tensors(batch, [saved[name] for name in names]),)
    return replace(source, batches=batches, inputs=GIVEN, sized=None)


def with_tensors(batch: Batch, tensors: list[torch.Tensor]) -> Batch:
    """Replace the tensors of a batch."""
    leaves, spec = pytree.tree_flatten((batch.args, batch.kwargs))
    fresh = iter(tensors)
    changed = [next(fresh) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(changed, spec)
    return Batch(args, kwargs)


def save_inputs(tensors: list[torch.Tensor], path: Path) -> None:
    """Write a batch's tensors in the format of ``with_inputs``."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    save_file({f"input[{i}]": t.detach().cpu().contiguous() for i, t in enumerate(tensors)}, part)
    part.replace(path)
