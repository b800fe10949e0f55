"""Inputs from a safetensors file: what ``--stress`` saves, and anybody can."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.utils import _pytree as pytree

from ampaudit.core.errors import InputError, first_line
from ampaudit.source.interface import Batch, ModelSource

__all__ = ["save_inputs", "with_inputs", "with_tensors"]


def with_inputs(source: ModelSource, path: Path) -> ModelSource:
    """The source with one batch, whose tensors are ``input[0]``, ``input[1]`` ... of the file.

    Raises:
        InputError: the file cannot be read, or its tensors are not those that the model takes.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        given = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read: {first_line(error)}", hint="check the path") from error
    batch = source.batches[0]
    leaves = pytree.tree_leaves((batch.args, batch.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    names = [f"input[{index}]" for index in range(len(tensors))]
    if set(given) != set(names):
        raise InputError(
            f"{path} holds {', '.join(sorted(given)) or 'nothing'}",
            hint=f"the model takes {', '.join(names)}",
        )
    for name, tensor in zip(names, tensors, strict=True):
        if given[name].dtype != tensor.dtype:
            hint = f"{name} must be {tensor.dtype}"
            raise InputError(f"{path}: {name} is {given[name].dtype}", hint=hint)
    return replace(source, batches=(with_tensors(batch, [given[name] for name in names]),))


def with_tensors(batch: Batch, tensors: list[torch.Tensor]) -> Batch:
    """The batch with other tensors in the places of its own."""
    leaves, spec = pytree.tree_flatten((batch.args, batch.kwargs))
    fresh = iter(tensors)
    changed = [next(fresh) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(changed, spec)
    return Batch(args, kwargs)


def save_inputs(tensors: list[torch.Tensor], path: Path) -> None:
    """Write a batch's tensors so that ``with_inputs`` reads them."""
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    save_file({f"input[{i}]": t.detach().cpu().contiguous() for i, t in enumerate(tensors)}, part)
    part.replace(path)
